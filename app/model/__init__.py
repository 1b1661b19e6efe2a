"""What pages speak of: plain data, without Streamlit."""
