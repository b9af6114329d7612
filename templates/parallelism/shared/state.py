#:: include "parallelism/shared/buffers.py" ::#

#:: include "parallelism/shared/gather.py" ::#

#:: include "parallelism/shared/load.py" ::#
