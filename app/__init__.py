"""The explorer: a Streamlit app over inshrink_core."""
