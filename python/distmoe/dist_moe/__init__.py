# SPDX-License-Identifier: Apache-2.0
"""The public names of dist_moe, computed by distmoe.

A program that was written against dist_moe changes its import and runs on Hopper GPUs or on a CPU.
docs/python.md says what differs.
"""

from distmoe.dist_moe import api
from distmoe.dist_moe.api import *  # noqa: F403

__all__ = api.__all__
