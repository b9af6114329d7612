#:: filter indent(4, true) ::#
#:: include "parallelism/shared/format.py" ::#
#:: endfilter ::#
