"""Server code around Streamlit: access checks, allowed folders, recent runs and large downloads."""
