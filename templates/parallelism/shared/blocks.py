#// Uses Config, nn. //#
def prepare_block(block: nn.Module, config: Config) -> nn.Module:
    """Let a block recompute its activations in backward, and compile it, if the settings say so."""
#:: filter indent(4, true) ::#
#:: include "parallelism/shared/block_steps.py" ::#
#:: endfilter ::#
    return block
