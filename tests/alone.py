"""What `dcp.save` and `dcp.load` are told where there is no process group: torch 2.6 sees it."""

import inspect

import torch.distributed.checkpoint as dcp

ALONE = {"no_dist": True} if "no_dist" in inspect.signature(dcp.save).parameters else {}
