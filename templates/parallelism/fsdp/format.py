    #:: include "parallelism/shared/format.py" ::#
