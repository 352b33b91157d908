"""Whether a run could fit into this machine's memory at all, asked before any text is read or written."""

from __future__ import annotations

import os
from pathlib import Path

from posbench.config import Config, ConfigError
from posbench.machine.signals import environment_number
from posbench.size import num_parameters

_BYTES_A_PARAMETER = 16  # weight, gradient and two moments, float32
_SMALLEST_VOCABULARY = 257  # of any tokenizer here: the bytes and the beginning of a document


def check_memory(config: Config) -> None:
    """Compare what parameters and one micro-batch take at least with the memory of this machine.

    Raises: ConfigError with the number of parameters and tokens, what they take, and what the machine has. A run that
    passes may still run out of memory; training says so then.
    """
    model, train = config.model, config.train
    vocab_size = model.vocab_size or _SMALLEST_VOCABULARY
    parameters = sum(num_parameters(config, vocab_size).values())
    processes = environment_number("WORLD_SIZE", config.launch.nproc)
    copies, parts = (1, processes) if config.launch.strategy == "fsdp" else (processes, 1)
    tokens = train.batch_size // train.accumulation * train.context_length
    for_weights = parameters * _BYTES_A_PARAMETER
    if is_on_gpus(config):  # each has a memory of its own; processes on CPUs share the machine's
        tokens //= processes
        for_weights //= parts
    else:
        for_weights *= copies
    for_tokens = tokens * 2 * model.num_layers * model.d_model  # what each block keeps of its input in half precision
    available = memory_bytes(config)
    if for_weights > available:
        raise ConfigError(
            f"the model has at least {parameters:,} parameters, which need {_gb(for_weights)} to train (weights, "
            f"gradients and moments), and this machine has {_gb(available)} of memory: lower model.num_layers, "
            "model.d_model or model.vocab_size"
        )
    if for_weights + for_tokens > available:
        raise ConfigError(
            f"{tokens:,} tokens at once (train.batch_size={train.batch_size} in "
            f"train.accumulation={train.accumulation} parts, train.context_length={train.context_length}) need at "
            f"least {_gb(for_tokens)} in addition to {_gb(for_weights)} for the model,  and this machine has "
            f"{_gb(available)} of memory: raise train.accumulation, or lower train.batch_size or train.context_length"
        )


def is_on_gpus(config: Config) -> bool:
    """Whether the run would take GPUs."""
    from posbench.machine.device import choose_device

    return choose_device(config.train).is_cuda


def memory_bytes(config: Config) -> int:
    """Of the GPU the run would take, else of the machine or the container."""
    import torch

    from posbench.machine.device import choose_device

    device = choose_device(config.train)
    if device.is_cuda:
        return int(torch.cuda.get_device_properties(device.torch).total_memory)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        file = Path(limit)
        if file.is_file() and (text := file.read_text().strip()).isdigit():
            total = min(total, int(text))
    return total


def _gb(count: int) -> str:
    return f"{count / 1e9:,.1f} GB"
