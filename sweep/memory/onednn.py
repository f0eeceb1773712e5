"""The workspace of oneDNN's LSTM layer, which the CPU's nn.LSTM keeps for backward.

Its size depends on the kernel that oneDNN chooses for this processor, so oneDNN is asked: the layer is run on zeros.
Where that would take long, it is asked for 64 samples: the workspace is made of matrices with a row of whole cache
lines for each sample and step, each rounded up to pages of 64 such lines, so from multiples of 64 samples on it grows
with samples and, after the first, with steps in equal parts.
"""

from __future__ import annotations

from typing import Any

import torch

from sweep.errors import CannotPredict

LSTM_LAYER = torch.ops.aten.mkldnn_rnn_layer.default
LSTM_BACKWARD = torch.ops.aten.mkldnn_rnn_layer_backward.default
#: Multiplications up to which the layer itself is run: about half a second on one core.
AFFORDABLE = 1e10
PAGE_ROWS = 64


def lstm_workspace(args: Any) -> int:
    """Bytes, for the arguments of mkldnn_rnn_layer: (steps, samples, features) and two weights first.

    Raises CannotPredict for a layer that is too large to ask for and whose workspace follows from no smaller one.
    """
    steps, samples, features = args[0].shape
    rows = tuple(args[1].shape), tuple(args[2].shape), args[0].dtype, tuple(args[7:])
    per_step = float(args[1].numel() + args[2].numel())
    if per_step * steps * samples <= AFFORDABLE:
        return _asked(steps, samples, features, *rows)
    one, two, three = (_asked(n, PAGE_ROWS, features, *rows) for n in (1, 2, 3))
    if samples % PAGE_ROWS or three - two != two - one:
        raise CannotPredict(
            f"oneDNN's workspace for an LSTM of {steps} steps and {samples} samples is not known without running it; "
            f"give a multiple of {PAGE_ROWS} samples, or fewer"
        )
    return samples // PAGE_ROWS * (one + (steps - 1) * (two - one))


def _asked(
    steps: int, samples: int, features: int, weights: Any, recurrent: Any, dtype: torch.dtype, options: Any
) -> int:
    hidden = recurrent[1]
    given = [torch.zeros(size, dtype=dtype) for size in ((steps, samples, features), weights, recurrent)]
    bias, state = torch.zeros(weights[0], dtype=dtype), torch.zeros(1, samples, hidden, dtype=dtype)
    return LSTM_LAYER(*given, bias, bias, state, state, *options)[3].untyped_storage().nbytes()
