"""Lines of the default project that tests edit, as pairs of a file and a text that it has once; and such edits."""

from __future__ import annotations

Line = tuple[str, str]
Changes = dict[Line, str]

STEM = ("model.py", "        self.norm = nn.GroupNorm(ModelConfig.groups, width)\n")
METHODS = ("model.py", "    def forward(self, images: Tensor) -> Tensor:\n")  # Of the stem.
FORWARD = ("model.py", "        return F.silu(self.norm(self.conv(images)))\n")
HEAD = ("model.py", "        self.linear = nn.Linear(width, CLASSES)\n")
POOLED = ("model.py", "        return self.linear(features.mean(dim=(2, 3)))\n")
BUILD = ("model.py", "    return nn.Sequential(blocks)\n")
LOADED = ("dataset.py", "        self.max_shift = max_shift\n")
ROW = ("dataset.py", "        row = random.randrange(2 * self.max_shift + 1)\n")
SAMPLE = ("dataset.py", "        return image, self.labels[index]\n")
COLLATED = ("dataset.py", "collate_fn = default_collate\n")
BUILT = ("dataset.py", '    return train_set, validation_set, Digits("test")\n')
TASK = ("task.py", '        """Build what the losses need, such as a teacher, which is then frozen in eval mode."""\n')
AUGMENTED = ("task.py", "        return inputs, targets\n\n    def prepare(")
PREPARED = ("task.py", "        return inputs, targets\n\n    def losses(")
LOSSES = ("task.py", '        return {"loss": F.cross_entropy(outputs.to(wide_dtype()), targets, reduction="sum")}\n')
WEIGHT = ("task.py", "        return len(targets)\n")
MEASURED = ("task.py", '        losses = F.cross_entropy(outputs.to(wide_dtype()), targets, reduction="none")\n')
ACCURACY = ("task.py", '            "accuracy": correct.mean(),\n')
OPTIMIZER = ("optim.py", "    return torch.optim.AdamW(\n")
BUILDER = ("optim.py", "def build_optimizer(module: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:\n")
UPDATED = ("train.py", "        self.optimizer.zero_grad()\n")
WRITE = ("checkpoint.py", "        files.write_atomically(path, lambda file: torch.save(content, file))\n")
# What edits of the model may use.
IMPORTS: Changes = {
    ("model.py", "from torch import Tensor, nn\n"): "import random\n\nimport numpy as np\nimport torch\n"
    "from torch import Tensor, nn\n"
}


def instead(line: Line, *statements: str) -> Changes:
    """Return an edit that replaces a line by statements, which have its indentation."""
    indent = line[1][: len(line[1]) - len(line[1].lstrip())]
    return {line: "".join(f"{indent}{statement}".rstrip() + "\n" for statement in statements)}


def before(line: Line, *statements: str) -> Changes:
    """Return an edit that inserts statements before a line."""
    return {line: instead(line, *statements)[line] + line[1]}


def after(line: Line, *statements: str) -> Changes:
    """Return an edit that inserts statements after a line."""
    return {line: line[1] + instead(line, *statements)[line]}
