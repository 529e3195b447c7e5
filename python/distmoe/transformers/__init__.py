# SPDX-License-Identifier: Apache-2.0
"""The experts of Hugging Face transformers 5 models, run by distmoe.

    import distmoe.transformers
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16,
                                                 experts_implementation="distmoe")

Importing this module registers the implementations that `NAMES` lists, one a precision.
"""

from transformers.integrations.moe import ExpertsInterface

from distmoe.errors import InvalidArgumentError
from distmoe.transformers.contexts import ExpertsOptions
from distmoe.transformers.experts import make_experts_forward

NAMES = {"distmoe": "bf16", "distmoe_mxfp8": "mxfp8", "distmoe_nvfp4": "nvfp4"}

__all__ = ["NAMES", "ExpertsOptions", "register"]


def register(name: str, options: ExpertsOptions) -> None:
    """Makes `experts_implementation=name` run experts with `options`."""
    if not isinstance(name, str):
        raise TypeError(f"name is {type(name).__name__}; it must be a string")
    if not name:
        raise InvalidArgumentError("name is empty; experts_implementation needs one")
    if not isinstance(options, ExpertsOptions):
        raise TypeError(f"options is {type(options).__name__}; it must be ExpertsOptions")
    ExpertsInterface.register(name, make_experts_forward(options))


for _name, _precision in NAMES.items():
    register(_name, ExpertsOptions(precision=_precision))
