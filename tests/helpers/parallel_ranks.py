"""The program of the processes of `ranks.start`: the cases of tensor and of sequence parallelism."""

import sys

from helpers import ranks, sequence_ranks, tensor_ranks

if __name__ == "__main__":
    slow = "--slow" in sys.argv
    found = {f"tensor: {name}": case for name, case in tensor_ranks.cases(slow).items()}
    ranks.run(found | {f"sequence: {name}": case for name, case in sequence_ranks.cases(slow).items()})
