"""What the pages ask: work that the engine does at once, jobs, and what is kept of both.

The engine is imported inside the functions, so that the first page does not wait for it. What comes back are
the engine's own reports and documents, or plain values where it has none; what goes wrong is a `ServiceError`
that a page can show. Long work are requests in processes of their own (`inshrink_app.jobs`). Names without an
underscore are what pages may ask for.
"""

from inshrink_app.jobs.registry import MOST_AT_WORK as MOST_AT_WORK
from inshrink_app.services.archives import *
from inshrink_app.services.comparing import *
from inshrink_app.services.drafts import *
from inshrink_app.services.drilldown import *
from inshrink_app.services.dropping import *
from inshrink_app.services.evaluating import *
from inshrink_app.services.exporting import *
from inshrink_app.services.inside import is_dropped as is_dropped
from inshrink_app.services.inside import missing_cuda as missing_cuda
from inshrink_app.services.jobs import *
from inshrink_app.services.logs import *
from inshrink_app.services.measuring import *
from inshrink_app.services.opening import *
from inshrink_app.services.rehearsing import *
from inshrink_app.services.searching import *
