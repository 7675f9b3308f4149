"""GroupMuon inside other people's training loops: one object that trains every weight and resumes bit for bit."""

import os
import subprocess
import sys

import pytest
import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader

from group_muon import GroupMuon, param_groups

GROUPS = dict(group_size=6, rule="random", verbose=False)


def gpt2(seed=0):
    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=16, n_embd=48, n_layer=2, n_head=12,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


class Tokens(torch.utils.data.Dataset):
    def __init__(self, count=48):
        self.rows = torch.randint(64, (count, 9), generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_equal(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def assert_every_weight_trained(model, before):
    same = [name for name, p in model.named_parameters() if torch.equal(p, before[name])]
    assert same == []


class TestTrainer:
    """Hugging Face's Trainer, with a schedule, gradient accumulation and clipping."""

    def trainer(self, folder, how, model=None, **more):
        model = model or gpt2()
        arguments = transformers.TrainingArguments(
            output_dir=str(folder), max_steps=6, save_steps=3, per_device_train_batch_size=4,
            gradient_accumulation_steps=2, max_grad_norm=0.5, lr_scheduler_type="cosine", warmup_steps=2,
            report_to=[], use_cpu=True, disable_tqdm=True, seed=3, logging_steps=1,
        )  # fmt: skip
        options = dict(lr=1e-3, adamw_lr=2e-3, **GROUPS)
        if how == "optimizers":
            optimizer = GroupMuon(model, **options)
            scheduler = transformers.get_cosine_schedule_with_warmup(optimizer, 2, 6)
            more["optimizers"] = (optimizer, scheduler)
        elif how == "optimizer_cls_and_kwargs":
            more["optimizer_cls_and_kwargs"] = (GroupMuon, {"model": model, **options})
        return transformers.Trainer(model, arguments, train_dataset=Tokens(), **more)

    @pytest.mark.parametrize("how", ["optimizers", "optimizer_cls_and_kwargs"])
    def test_trains_every_weight_and_resumes_bit_for_bit(self, tmp_path, how):
        straight = self.trainer(tmp_path / "a", how)
        before = weights(straight.model)
        straight.train()
        assert_every_weight_trained(straight.model, before)
        lrs = [entry["learning_rate"] for entry in straight.state.log_history if "loss" in entry]
        assert len(set(lrs)) > 3  # the schedule reaches the first group
        inner = straight.optimizer.optimizer
        assert isinstance(inner, GroupMuon)
        steps = {float(inner.state[p]["step"]) for p in straight.model.parameters()}
        assert steps == {6.0}  # one step for every two batches
        resumed = self.trainer(tmp_path / "a", how, gpt2(seed=9))
        resumed.train(resume_from_checkpoint=str(tmp_path / "a/checkpoint-3"))
        assert_equal(weights(straight.model), weights(resumed.model))
        for p, q in zip(straight.model.parameters(), resumed.model.parameters()):
            mine, other = inner.state[p], resumed.optimizer.optimizer.state[q]
            for key in mine:
                assert torch.equal(torch.as_tensor(mine[key]), torch.as_tensor(other[key]))

    def test_its_own_groups_are_refused_with_what_to_pass(self, tmp_path):
        trainer = self.trainer(tmp_path, "", optimizer_cls_and_kwargs=(GroupMuon, {"lr": 1e-3}))
        with pytest.raises(ValueError, match="is not a matrix. Pass the model"):
            trainer.train()

    def test_muons_groups_alone_are_refused(self):
        groups = param_groups(gpt2(), **GROUPS)
        only = [group for group in groups if group["algorithm"] == "muon"]
        with pytest.raises(ValueError, match="8 of the model's 28 trainable weights.*partial=True"):
            GroupMuon(only)
        assert len(GroupMuon(only, partial=True).param_groups) == len(only)


class TestLightning:
    def module(self, seed=0):
        import lightning

        class Module(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.net = gpt2(seed)

            def training_step(self, batch, index):
                return self.net(**batch).loss

            def configure_optimizers(self):
                optimizer = GroupMuon(self, lr=1e-3, **GROUPS)
                schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
                return {
                    "optimizer": optimizer,
                    "lr_scheduler": {"scheduler": schedule, "interval": "step"},
                }

        return Module()

    def fit(self, folder, epochs, seed=0, checkpoint=None):
        import lightning

        trainer = lightning.Trainer(
            accelerator="cpu", devices=1, max_epochs=epochs, accumulate_grad_batches=2, gradient_clip_val=0.5,
            default_root_dir=folder, logger=False, enable_progress_bar=False, enable_model_summary=False,
            enable_checkpointing=False,
        )  # fmt: skip
        module = self.module(seed)
        before = weights(module)
        trainer.fit(module, DataLoader(Tokens(), batch_size=8), ckpt_path=checkpoint)
        assert_every_weight_trained(module, before)
        return trainer, module

    @pytest.mark.filterwarnings("ignore")
    def test_counts_steps_once_and_resumes_bit_for_bit(self, tmp_path):
        trainer, straight = self.fit(tmp_path, epochs=4)
        assert trainer.global_step == 4 * 6 // 2  # not twice, as with two optimizers
        half, _ = self.fit(tmp_path, epochs=2)
        half.save_checkpoint(tmp_path / "half.ckpt")
        trainer, resumed = self.fit(tmp_path, epochs=4, seed=9, checkpoint=tmp_path / "half.ckpt")
        assert trainer.global_step == 12
        assert_equal(weights(straight), weights(resumed))


class TestAccelerate:
    def prepared(self, seed=0):
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = gpt2(seed)
        optimizer = GroupMuon(model, lr=1e-3, **GROUPS)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        data = DataLoader(Tokens(), batch_size=8)
        return accelerator, accelerator.prepare(model, optimizer, data, schedule)

    def epoch(self, accelerator, prepared):
        model, optimizer, data, schedule = prepared
        for batch in data:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()

    def test_resumes_bit_for_bit(self, tmp_path):
        accelerator, prepared = self.prepared()
        before = weights(prepared[0])
        self.epoch(accelerator, prepared)
        accelerator.save_state(str(tmp_path / "half"))
        self.epoch(accelerator, prepared)
        assert_every_weight_trained(prepared[0], before)
        assert {float(s["step"]) for s in prepared[1].state.values()} == {6.0}
        accelerator, resumed = self.prepared(seed=9)
        accelerator.load_state(str(tmp_path / "half"))
        self.epoch(accelerator, resumed)
        assert_equal(weights(prepared[0]), weights(resumed[0]))


class TestLora:
    def adapted(self):
        import peft

        config = peft.LoraConfig(
            r=8, target_modules=["c_attn", "c_fc"], task_type="CAUSAL_LM", fan_in_fan_out=True
        )
        return peft.get_peft_model(gpt2(), config)

    def test_the_adapters_and_only_they_are_trained(self):
        model = self.adapted()
        optimizer = GroupMuon(model, lr=1e-3, **GROUPS)
        before, batch = weights(model), next(iter(DataLoader(Tokens(), batch_size=8)))
        for _ in range(2):  # in the first step the A's have no gradient yet, since the B's are 0
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()
        changed = [n for n, p in model.named_parameters() if not torch.equal(p, before[n])]
        assert changed == [name for name, p in model.named_parameters() if p.requires_grad]
        assert len(changed) == 8 and all("lora_" in name for name in changed)

    def test_a_model_without_trainable_weights_is_refused(self):
        with pytest.raises(ValueError, match="GPT2LMHeadModel has no trainable weights"):
            GroupMuon(gpt2().requires_grad_(False))


# One process of two: DDP on half of each batch, a restart in the middle, and ZeroRedundancyOptimizer's refusals.
PROCESS = """
import sys, torch, torch.distributed as dist
from test_frameworks import GROUPS, Tokens, gpt2, weights
from group_muon import GroupMuon, param_groups

folder, rank, world = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{folder}/store{world}", rank=rank, world_size=world)

def start(seed=0):
    torch.set_num_threads(1)
    model = torch.nn.parallel.DistributedDataParallel(gpt2(seed))
    return model, GroupMuon(model, lr=1e-3, precision="float32", **GROUPS)

def train(model, optimizer, steps):
    for step in steps:
        rows = Tokens().rows[8 * step + rank : 8 * step + 8 : world]
        optimizer.zero_grad()
        model(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()

model, optimizer = start()
train(model, optimizer, range(2))
torch.save((model.state_dict(), optimizer.state_dict()), f"{folder}/half{world}-{rank}")
train(model, optimizer, range(2, 4))
resumed, other = start(seed=9)
state, optimizer_state = torch.load(f"{folder}/half{world}-{rank}")
resumed.load_state_dict(state)
other.load_state_dict(optimizer_state)
train(resumed, other, range(2, 4))
a, b = weights(model.module), weights(resumed.module)
assert all(torch.equal(a[name], b[name]) for name in a), "resumed"
torch.save(a, f"{folder}/{world}-{rank}")

if world == 2:
    from torch.distributed.optim import ZeroRedundancyOptimizer
    groups = param_groups(gpt2(), **GROUPS)
    try:
        ZeroRedundancyOptimizer([g | {"params": [p for _, p in g["params"]]} for g in groups], GroupMuon)
    except ValueError as error:
        assert "ZeroRedundancyOptimizer splits groups; it is not supported" in str(error), error
    else:
        raise AssertionError("ZeroRedundancyOptimizer was not refused")
dist.destroy_process_group()
"""


def processes(folder, world):
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(
            [os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")]
        ),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(folder), str(rank), str(world)],
            env=environment, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    for process in started:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
    return [torch.load(folder / f"{world}-{rank}") for rank in range(world)]


def test_ddp_gives_the_weights_of_one_process_and_resumes_bit_for_bit(tmp_path):
    first, second = processes(tmp_path, 2)
    assert_equal(first, second)
    (alone,) = processes(tmp_path, 1)
    start = weights(gpt2())
    for name in alone:
        change = (alone[name] - start[name]).norm()
        assert change > 0
        # Sums in another order, which the iteration amplifies.
        assert (first[name] - alone[name]).norm() < 1e-3 * change, name


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.lm_head = nn.Linear(8, 10, bias=False)
        self.lm_head.weight = self.embed.weight
        self.mix = nn.Linear(8, 8)


def test_a_tied_weight_is_counted_and_trained_once():
    optimizer = GroupMuon(Tied(), verbose=False)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 3
