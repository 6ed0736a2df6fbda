"""The transformers Trainer with FSDP: save_steps, and train(resume_from_checkpoint=…)."""

from __future__ import annotations

import os

import shared
import torch
import torch.distributed as dist
import transformers
from cpu_stub import stub_accelerate


class Task(transformers.Trainer):
    """Its own loop; the loss of each step is noted, over all ranks and unrounded."""

    def __init__(self, *arguments: object, **more: object) -> None:
        super().__init__(*arguments, **more)
        self.losses: list[float] = []

    def compute_loss(
        self, model: torch.nn.Module, inputs: dict[str, torch.Tensor], **_: object
    ) -> torch.Tensor:
        tokens = inputs["input_ids"]
        loss = shared.loss_of(model(input_ids=tokens).logits, tokens)
        self.losses.append(shared.mean(loss))
        return loss


def model_of() -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 20, "intermediate_size": 41, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 10}
    config = transformers.LlamaConfig(vocab_size=shared.VOCAB, **sizes, **heads)
    return transformers.LlamaForCausalLM(config)


def main() -> None:
    want, device = shared.asked(), shared.device()
    side, form = want.side.split("-")
    stubs = stub_accelerate(device)
    arguments = transformers.TrainingArguments(
        output_dir=os.path.join(want.folder, "saved" if want.is_new else f"{want.name}.trainer"),
        use_cpu=device.type == "cpu",
        per_device_train_batch_size=shared.ROWS // int(os.environ["WORLD_SIZE"]),
        max_steps=2 * shared.STEPS,
        save_steps=shared.STEPS,
        save_strategy="steps" if want.is_new else "no",
        learning_rate=shared.LR,
        lr_scheduler_type="linear",
        max_grad_norm=1e9,
        weight_decay=0.1,
        train_sampling_strategy="sequential",
        report_to=[],
        disable_tqdm=True,
        fsdp="full_shard auto_wrap",
        fsdp_config={
            "version": int(side[-1]),
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "state_dict_type": f"{form.upper()}_STATE_DICT",
            "use_orig_params": True,
            "sync_module_states": False,  # all ranks begin with the same seed
        },
    )
    rows = torch.cat([shared.batch(n) for n in range(2 * shared.STEPS)])
    trainer = Task(
        model=model_of(),
        args=arguments,
        train_dataset=[{"input_ids": row} for row in rows],
        data_collator=transformers.default_data_collator,
    )
    trainer.train(resume_from_checkpoint=want.ckpt or None)
    shared.note(want, trainer.losses, stubs=stubs)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
