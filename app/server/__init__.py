"""What the server does around Streamlit: who is answered, which folders may be seen, large files."""
