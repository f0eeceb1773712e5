"""A small residual network with BatchNorm: its running statistics show whether recomputation counts a batch twice."""

from __future__ import annotations

from torch import Tensor, nn


class ResidualNet(nn.Module):
    """Images (B, channels, height, width) -> logits (B, classes). All blocks are alike: same size, same features.

    Args:
        channels: image channels.
        classes: number of classes.
        layers: residual blocks, each of two 3x3 convolutions.
        features: channels between the first layer and the last.
    """

    def __init__(self, channels: int, classes: int, layers: int, features: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(channels, features, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(features),
            nn.ReLU(inplace=True),
        )
        self.blocks = nn.Sequential(*(ResidualBlock(features) for _ in range(layers)))
        self.head = nn.Linear(features, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, channels, height, width) float -> logits (B, classes), from the mean over pixels."""
        x = self.blocks(self.stem(images))
        logits: Tensor = self.head(x.mean(dim=(2, 3)))
        return logits


class ResidualBlock(nn.Module):
    """relu(x + norm2(conv2(relu(norm1(conv1(x)))))): (B, features, height, width) -> the same (arXiv:1512.03385)."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(features, features, kernel_size=3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(features)
        self.conv2 = nn.Conv2d(features, features, kernel_size=3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(features)
        self.relu = nn.ReLU(inplace=True)  # in place, as residual networks usually are: one activation less each

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        out: Tensor = self.relu(x + self.norm2(self.conv2(y)))
        return out
