"""Services: the interface between pages and engine, and the only place that caches.

Services return the engine's reports and documents, or plain values. Errors are raised as `ServiceError`,
which a page can show. Long work runs as requests in processes of their own (`inshrink_app.jobs`). Pages use
only names without a leading underscore. Engine modules that load torch or numba are imported inside the
functions that need them, so that pages open without that delay.
"""

from inshrink_app.jobs.registry import MAX_AT_WORK as MAX_AT_WORK
from inshrink_app.services.archives import *
from inshrink_app.services.chosen import *
from inshrink_app.services.drilldown import *
from inshrink_app.services.dropping import *
from inshrink_app.services.evaluating import *
from inshrink_app.services.exporting import *
from inshrink_app.services.inside import is_dropped as is_dropped
from inshrink_app.services.inside import samples as samples
from inshrink_app.services.jobs import *
from inshrink_app.services.measuring import *
from inshrink_app.services.opening import *
from inshrink_app.services.searching import *
