"""Data types of the pages: plain data, without Streamlit."""

from inshrink_app.model.config import *
from inshrink_app.model.measured import *
from inshrink_app.model.page import *
from inshrink_app.model.problem import *
from inshrink_app.model.sensitivity import *
from inshrink_app.model.subject import *
