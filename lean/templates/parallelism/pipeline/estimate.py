    # The shapes of what passes between stages, which ranks would send each other: those of the whole model.
    from .model import build_model
    from .parallel import shapes_of, split_batch
    from .stages import outline_stages

    (x, _), *_ = split_batch(batch, config.train.microbatches)
    number, count = torch.empty(1, dtype=torch.int64, device="meta"), len(parallel.owners)
    forms = parallel.forms.setdefault(shapes_of(x), {0: number, count: number})
    stages, _ = outline_stages(config.model, count)
    with torch.no_grad(), parallel.autocast():
        for stage, block in zip(stages, build_model(config.model), strict=True):
            if stage not in forms:
                forms[stage] = torch.empty(x.shape, dtype=x.dtype, device="meta", requires_grad=True)
            x = block(x)
