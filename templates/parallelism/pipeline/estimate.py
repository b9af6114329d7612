# The shapes that stages would send each other, from the whole model.
from .loader import split_batch
from .model import build_model
from .stages import NUMBER, outline_stages, shapes_of

(x, _), *_ = split_batch(batch, config.train.microbatches)
count = len(parallel.owners)
forms = parallel.forms.setdefault(shapes_of(x), {0: NUMBER, count: NUMBER})
with torch.no_grad(), parallel.autocast():
    for stage, block in zip(outline_stages(config.model, count)[0], build_model(config.model), strict=True):
        forms.setdefault(stage, torch.empty(x.shape, dtype=x.dtype, device="meta", requires_grad=stage > 0))
        x = block(x)
