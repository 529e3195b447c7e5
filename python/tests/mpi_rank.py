# SPDX-License-Identifier: Apache-2.0
"""One rank of test_communicator.py under mpirun: leaves what it computed in a folder."""

import json
import sys
from pathlib import Path

import distmoe
from layer import Layer, digest, make_config, run_training

communicator = distmoe.make_mpi_communicator()
rank, config = communicator.rank(), make_config()
with distmoe.Context.create(config, communicator) as context:
    results = run_training(context, Layer(config, num_tokens=4 + rank, seed=rank))
(Path(sys.argv[1]) / f"{rank}.json").write_text(json.dumps(digest(results)))
