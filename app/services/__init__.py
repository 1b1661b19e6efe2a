"""What the pages ask: work that the engine does at once, jobs, and what is kept of both.

What comes back are the engine's own reports and documents, or plain values where it has none; what goes wrong
is a `ServiceError` that a page can show. Long work are requests in processes of their own
(`inshrink_app.jobs`). Names without an underscore are what pages may ask for. The engine's modules are
imported as any others; those that load torch or numba only in the functions that need them, so that no page
waits.
"""

from inshrink_app.jobs.registry import MOST_AT_WORK as MOST_AT_WORK
from inshrink_app.services.archives import *
from inshrink_app.services.chosen import *
from inshrink_app.services.comparing import *
from inshrink_app.services.drilldown import *
from inshrink_app.services.dropping import *
from inshrink_app.services.evaluating import *
from inshrink_app.services.exporting import *
from inshrink_app.services.inside import is_dropped as is_dropped
from inshrink_app.services.inside import missing_cuda as missing_cuda
from inshrink_app.services.inside import samples as samples
from inshrink_app.services.jobs import *
from inshrink_app.services.logs import *
from inshrink_app.services.measuring import *
from inshrink_app.services.opening import *
from inshrink_app.services.searching import *

from inshrink_core.execution.engines import installed_engines as installed_engines
