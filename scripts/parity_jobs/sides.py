"""The two sides, FSDP1 and FSDP2: how each builds, accumulates, and shows whole tensors.

A side is told by a few words (its mesh, its strategy, its policy), which scenarios.py lists.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import tiny
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Side:
    """One way to train: ``engine`` fsdp1 or fsdp2; ``mesh`` 1d, hsdp, tp or none.

    ``strategy`` is FSDP1's sharding strategy (FSDP2: SHARD_GRAD_OP keeps parameters gathered).
    """

    engine: str
    mesh: str = "1d"
    strategy: str = "FULL_SHARD"
    orig_params: bool = True
    bf16: bool = False
    offload: bool = False
    meta: bool = False
    accumulate: bool = False

    def words(self) -> str:
        """For a person."""
        if self.engine == "fsdp1":
            said = [self.strategy, "no device_mesh" if self.mesh == "none" else ""]
            said += ["" if self.orig_params else "use_orig_params=False"]
        else:
            meshes = {"1d": "1-D mesh", "hsdp": "HSDP mesh", "tp": "FSDP × TP mesh"}
            kept = "reshard_after_forward=False" if self.strategy == "SHARD_GRAD_OP" else ""
            said = [meshes[self.mesh], kept]
        said += ["bf16 policy" if self.bf16 else "", "CPU offload" if self.offload else ""]
        said += ["meta-device init" if self.meta else ""]
        sync = "no_sync()" if self.engine == "fsdp1" else "set_requires_gradient_sync()"
        said += [sync if self.accumulate else ""]
        return f"{self.engine.upper()} {', '.join(filter(None, said))}"


class Run:
    """A model and its optimizer on one side, in a running process group."""

    def __init__(self, side: Side, kind: str, device: torch.device) -> None:
        self.side = side
        self.device = device
        self.mesh = _mesh(side, device.type)
        seed = 7 if side.meta else 7 + 100 * (kind != "lora")  # weights must come from the file
        model = tiny.seeded(kind, seed=seed)
        build = _fsdp1 if side.engine == "fsdp1" else _fsdp2
        self.model = build(model, self, kind)
        split = side.engine == "fsdp2" or side.orig_params
        groups = tiny.groups(self.model, split=split and side.orig_params)
        self.optimizer = torch.optim.AdamW(groups, lr=0.01)

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's samples: ranks that share tensor-parallel work share them."""
        parts, mine = dist.get_world_size(), dist.get_rank()
        if self.side.mesh == "tp":
            parts, mine = self.mesh["dp"].size(), self.mesh["dp"].get_local_rank()
        return whole.chunk(parts)[mine].to(self.device)

    def backward(self, step: int) -> torch.Tensor:
        """Gradients of one step, in two microbatches when the side accumulates; the mean loss."""
        tokens, labels = map(self.part, tiny.batch(step))
        if not self.side.accumulate:
            return self._micro(tokens, labels, sync=True, scale=1.0)
        pairs = list(zip(tokens.chunk(2), labels.chunk(2), strict=True))
        losses = [
            self._micro(*pair, sync=place == len(pairs) - 1, scale=1 / len(pairs))
            for place, pair in enumerate(pairs)
        ]
        return torch.stack(losses).sum()

    def _micro(
        self, tokens: torch.Tensor, labels: torch.Tensor, *, sync: bool, scale: float
    ) -> torch.Tensor:
        with self.unsynced() if not sync else contextlib.nullcontext():
            loss = tiny.loss_of(self.model(tokens), labels) * scale
            loss.backward()
        shared = loss.detach().clone()
        dist.all_reduce(shared)
        return shared / dist.get_world_size()

    @contextlib.contextmanager
    def unsynced(self) -> Iterator[None]:
        """Backward passes in here leave each rank its own gradients."""
        if isinstance(self.model, FullyShardedDataParallel):
            with self.model.no_sync():
                yield
            return
        self.model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.model.set_requires_gradient_sync(True)

    def step(self) -> None:
        """Let the optimizer take its step."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def parameters(self) -> Tensors:
        """Whole parameters by name, on the CPU."""
        return self._whole(grads=False)

    def gradients(self) -> Tensors:
        """Whole synchronized gradients by name, on the CPU."""
        return self._whole(grads=True)

    def _whole(self, *, grads: bool) -> Tensors:
        # FSDP1 cannot show them with use_orig_params=False (its flat ones are of one unit), and not
        # when they are offloaded: torch gathers them with NCCL, which takes none from the CPU.
        if grads and self.side.offload:
            return {}
        if isinstance(self.model, FullyShardedDataParallel):
            context = FullyShardedDataParallel.summon_full_params(
                self.model, with_grads=grads and self.side.orig_params
            )
        else:
            context = contextlib.nullcontext()
        found: Tensors = {}
        with context:
            for name, p in self.model.named_parameters():
                value = p.grad if grads else p
                if value is not None and (p.requires_grad or not grads):
                    found[_clean(name)] = whole(value)
        return found

    def optimizer_state(self) -> Tensors:
        """The whole optimizer state by name, hyper-parameters too, on the CPU."""
        options = StateDictOptions(full_state_dict=True)
        state = get_optimizer_state_dict(self.model, self.optimizer, options=options)
        found: Tensors = {}
        for name, values in state["state"].items():
            for key, value in values.items():
                found[f"{name}.{key}"] = torch.as_tensor(value).detach().cpu().clone()
        for group in state["param_groups"]:
            for name in group["params"]:
                for key in ("lr", "weight_decay", "eps"):
                    found[f"{name}.{key}"] = torch.tensor(float(group[key]), dtype=torch.float64)
        return found

    def local_gradients(self) -> Tensors:
        """This rank's unsharded gradients after a backward pass without synchronization."""
        if isinstance(self.model, FullyShardedDataParallel):
            return _flat_gradients(self.model)
        return _unsharded_gradients(self.model)


def whole(value: torch.Tensor) -> torch.Tensor:
    """All of a tensor, on the CPU, whatever holds it; all ranks must call this together."""
    detached = value.detach()
    if isinstance(detached, DTensor):
        detached = detached.full_tensor()
    return detached.cpu().clone()


def hsdp_shape(world: int) -> tuple[int, int]:
    """Replicas × shards: two replicas, unless that leaves one shard.

    With one shard FSDP1 makes HYBRID_SHARD into NO_SHARD, and its replicas drift apart.
    """
    return (2, world // 2) if world >= 4 else (1, world)


def _clean(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "")


def _mesh(side: Side, device_type: str) -> DeviceMesh:
    world = dist.get_world_size()
    if side.mesh == "hsdp":
        shape = hsdp_shape(world)
        return init_device_mesh(device_type, shape, mesh_dim_names=("dp_replicate", "dp_shard"))
    if side.mesh == "tp":
        shape = (world // 2, 2)
        return init_device_mesh(device_type, shape, mesh_dim_names=("dp", "tp"))
    return init_device_mesh(device_type, (world,), mesh_dim_names=("dp_shard",))


def _fsdp1(model: nn.Module, run: Run, kind: str) -> nn.Module:
    side, cuda = run.side, run.device.type == "cuda"
    bf16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NO_SHARD is deprecated, and people still have it
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({tiny.Block}),
            sharding_strategy=ShardingStrategy[side.strategy],
            device_mesh=None if side.mesh == "none" else run.mesh,
            device_id=torch.cuda.current_device() if cuda else torch.device("cpu"),
            use_orig_params=side.orig_params or kind == "lora",
            mixed_precision=bf16 if side.bf16 else None,
            cpu_offload=CPUOffload(offload_params=True) if side.offload else None,
        )


def _fsdp2(model: nn.Module, run: Run, kind: str) -> nn.Module:
    side = run.side
    if side.meta:
        with torch.device("meta"):
            model = tiny.Tiny(kind)
    else:
        model.to(run.device)
    mesh = run.mesh
    if side.mesh == "tp":
        plan = {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()}
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], plan)
        mesh = mesh["dp"]
    options: dict[str, object] = {"mesh": mesh}
    options["reshard_after_forward"] = side.strategy != "SHARD_GRAD_OP"
    if side.bf16:
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if side.offload:
        options["offload_policy"] = CPUOffloadPolicy()
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    if side.meta:
        model.to_empty(device=run.device)
    return model


def _flat_gradients(model: nn.Module) -> Tensors:
    """FSDP1 without sync: each flat parameter's unsharded gradient, cut by its own metadata."""
    found: Tensors = {}
    for prefix, module in model.named_modules():
        if not isinstance(module, FullyShardedDataParallel) or module._handle is None:  # noqa: SLF001  (the only way to them)
            continue
        flat = module._handle.flat_param  # noqa: SLF001
        owner = _clean(f"{prefix}.") if prefix else ""
        gradient = flat.grad if flat.grad is not None else flat._saved_grad_shard  # noqa: SLF001
        place = 0
        sizes = flat._numels_with_padding  # noqa: SLF001
        shapes = iter(zip(flat._fqns, flat._shapes, strict=True))  # noqa: SLF001
        for size, padding in zip(sizes, flat._is_padding_mask, strict=True):  # noqa: SLF001
            if not padding:
                name, shape = next(shapes)
                piece = gradient[place : place + size].detach().cpu().clone()
                found[owner + name] = piece.view(shape)
            place += size
    return found


def _unsharded_gradients(model: nn.Module) -> Tensors:
    """FSDP2 without sync: what each parameter has accumulated unsharded."""
    found: Tensors = {}
    names = {id(p): name for name, p in model.named_parameters()}
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        group = module._get_fsdp_state()._fsdp_param_group  # noqa: SLF001  (the only way to them)
        for one in group.fsdp_params if group is not None else ():
            value = one.unsharded_accumulated_grad
            if value is None and one._unsharded_param is not None:  # noqa: SLF001
                value = one._unsharded_param.grad  # noqa: SLF001
            if value is not None:
                found[names[id(one.sharded_param)]] = value.detach().cpu().float().clone()
    return found
