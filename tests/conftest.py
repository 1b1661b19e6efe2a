"""One thread of PyTorch for each test process, and for the processes that tests start.

Several workers share few cores. Where threads outnumber cores, OpenMP's threads spin at every barrier
while the one they wait for is not running, and most of the processor time is lost to that. Set before
anything imports torch; what is promised for several threads sets their number itself.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
