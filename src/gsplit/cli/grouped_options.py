"""How commands list their options, and what they answer to the names of options that other programs have.

``gsplit train`` has more options than a screen has lines. Its help begins with those that most runs need; the others
follow by what they are about. The groups also order the reference of the command line (docs/hooks.py).
"""

from collections.abc import Iterator
from typing import Any

from typer.core import TyperCommand

__all__ = ["Command", "GroupedCommand", "option_groups"]

_GROUPS = {
    "Main options": (
        *("nproc", "out", "resume", "device", "strategy"),
        *("model", "hidden", "fanout", "batch_size", "epochs", "steps", "lr", "dropout"),
    ),
    "Model": ("own_model", "heads", "norm", "jk", "edge_attr", "edge_weight", "precision"),
    "Task and data": ("task", "targets", "features", "loss", "class_weights"),
    "Link prediction": ("pairs", "neg_sampling", "num_negatives", "embedding", "ranked_negatives"),
    "Sampling": ("sampler", "weight_attr", "replace", "layer_dependency", "seed"),
    "Optimizer": ("accumulate", "weight_decay", "lr_scheduler", "warmup_steps", "max_grad_norm"),
    "Evaluation": ("metric", "evaluate_every", "patience", "workspace"),
    "Ranks and failures": ("replicas", "trial_steps", "max_restarts", "min_ranks", "deterministic", "verify_every"),
    "Loading and memory": (
        *("features_on_disk", "cache", "device_cache", "copies", "prefetch", "sampling_threads", "sample_device"),
    ),
    "Settings, checkpoints and logs": (
        *(
            "config",
            "save_every",
            "keep_checkpoints",
            "overwrite",
            "log_dir",
            "log_every",
            "tensorboard",
            "as_json",
            "help",
        ),
    ),
}
_MEANT = {
    "--depth": ("--fanout", "--fanout 15,10,5, with a number of neighbours for each layer"),
    "--layers": ("--fanout", "--fanout 15,10,5, with a number of neighbours for each layer"),
    "--num-layers": ("--fanout", "--fanout 15,10,5, with a number of neighbours for each layer"),
    "--num-neighbors": ("--fanout", "--fanout 15,10,5, with a number of neighbours for each layer"),
    "--learning-rate": ("--lr", "--lr"),
    "--nproc-per-node": ("--nproc", "--nproc"),
    "--num-workers": ("--sampling-threads", "--prefetch 2N --sampling-threads N"),
    "--ranks": ("--nproc", "--nproc"),
}
"""Names of options elsewhere: the option of ours, and how to use it. Other mistakes are answered by their spelling."""


class Command(TyperCommand):
    """A command that names its own option when it is given one of ``_MEANT``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {name for parameter in self.params for name in parameter.opts}
        for word in args:
            given = word.partition("=")[0]
            ours, use = _MEANT.get(given, ("", ""))
            if given not in known and ours in known:
                ctx.fail(f"No such option: {given}. Fix: use {use}.")
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed


class GroupedCommand(Command):
    """A command with many options, which its help lists in groups."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        for title, parameters in option_groups(self.get_params(ctx)):
            with formatter.section(title):
                formatter.write_dl([parameter.get_help_record(ctx) for parameter in parameters])


def option_groups(parameters: list[Any]) -> Iterator[tuple[str, list[Any]]]:
    """The arguments and options of a command by group; groups that a command has nothing of are left out."""
    by_name = {parameter.name: parameter for parameter in parameters}
    yield "Arguments", [by_name.pop(each.name) for each in parameters if each.param_type_name == "argument"]
    for title, names in _GROUPS.items():
        found = [by_name.pop(name) for name in names if name in by_name]
        if found:
            yield title, found
    if by_name:
        yield "Other options", list(by_name.values())
