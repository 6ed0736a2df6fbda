"""verl's FSDPCheckpointManager: save_checkpoint and load_checkpoint, in a loop of our own."""

from __future__ import annotations

import os

import shared
import torch
import torch.distributed as dist
import transformers
from omegaconf import OmegaConf
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

STUB = "only the manager is verl's: its workers need ray and GPUs"


class Words(transformers.PreTrainedTokenizerFast):
    """The manager saves a tokenizer; this one has no words."""

    def save_pretrained(self, *_: object, **__: object) -> None:
        return None


def model_of(side: str, device: torch.device) -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 20, "intermediate_size": 41, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 10}
    config = transformers.LlamaConfig(vocab_size=shared.VOCAB, **sizes, **heads)
    model = transformers.LlamaForCausalLM(config).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    if side == "fsdp1":
        policy = ModuleWrapPolicy({LlamaDecoderLayer})
        options = {"device_mesh": mesh, "device_id": device, "use_orig_params": True}
        return FullyShardedDataParallel(model, auto_wrap_policy=policy, **options)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def main() -> None:
    want, device = shared.asked(), shared.device()
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    model = model_of(want.side, device)
    optimizer = torch.optim.AdamW(shared.groups(model), lr=shared.LR)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, shared.schedule)
    contents = ["model", "optimizer", "extra"]
    manager = FSDPCheckpointManager(
        model,
        optimizer,
        lr_scheduler=scheduler,
        processing_class=None,
        checkpoint_config=OmegaConf.create({"save": contents, "load": contents}),
    )
    first = 0
    if not want.is_new:
        manager.load_checkpoint(want.ckpt)
        first = scheduler.last_epoch
    losses: list[float] = []
    for step in range(first, 2 * shared.STEPS):
        mine = shared.part(shared.batch(step)).to(device)
        loss = shared.loss_of(model(input_ids=mine).logits, mine)
        loss.backward()
        losses.append(shared.mean(loss))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if want.is_new and step + 1 == shared.STEPS:
            place = os.path.join(want.saved, f"global_step_{shared.STEPS}", "actor")
            manager.save_checkpoint(place, global_step=shared.STEPS)
    shared.note(want, losses, stubs=STUB)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
