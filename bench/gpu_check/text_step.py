"""The text model of the examples on the device: the compute of a micro-batch, timed."""

from __future__ import annotations

from typing import Any

import torch
from text_model import ByteTransformer, mean_loss
from torch import Tensor

import chronica_hvd as chronica
from gpu_check.block import Setting
from gpu_check.comparison import harvest
from gpu_check.device import Device


class TextStep:
    """Forward and backward pass of the text model.

    Attributes
    ----------
    device
        Where it computes.
    longest
        The longest text, in bytes.
    """

    def __init__(self, setting: Setting) -> None:
        # As training has it on a GPU with tensor cores; else float32 would keep them idle.
        torch.set_float32_matmul_precision("high")
        torch.manual_seed(0)
        width, heads, self.longest = (32, 2, 128) if setting.quick else (1024, 16, 2048)
        self.device = Device(setting.device)
        self._model = ByteTransformer(width, heads, self.longest).to(setting.device)
        self._timer = chronica.StepTimer(setting.device, capacity=1 << 16)
        self._measured = 0
        self.settings = {"width": width, "heads": heads, "longest": self.longest, "matmul_precision": "high"}

    def random_batch(self, samples: int, length: int) -> tuple[Tensor, Tensor]:
        """Return texts of one length, on the device, and their lengths."""
        text = torch.randint(256, (samples, length), device=self.device.name)
        return text, torch.full((samples,), length, device=self.device.name)

    def measure(self, number: int, text: Tensor, lengths: Tensor) -> None:
        """Compute a micro-batch of texts, (samples, length), and time it under a number."""
        samples, length = text.shape
        self._timer.start(step=number, samples=samples, size=samples * length, size2=samples * length**2)
        mean_loss(self._model, text, lengths).backward()
        self._timer.stop()
        self._measured += 1
        # Gradients are dropped outside of the measured part, as zero_grad() is.
        self._model.zero_grad()

    def records(self) -> Any:
        """Return the records since the last call, when the device is through."""
        self.device.synchronize()
        expected, self._measured = self._measured, 0
        return harvest(self._timer, expected)
