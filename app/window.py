"""The explorer in a desktop window: a separate process, since window and server both need the main thread.

`inshrink_app.launch` starts it with the address. It writes ``ready`` once toolkit and display are available,
and opens the window at the next line of input. It ends with its window, or when the server ends and closes
its input.
"""

from __future__ import annotations

import logging
import sys
import threading

READY = "ready\n"
_SIZE = (1440, 960)


def main() -> None:
    """Open the window and return once it is closed."""
    logging.getLogger("pywebview").setLevel(logging.CRITICAL)
    import webview
    from webview.guilib import initialize

    try:
        initialize()
    except webview.WebViewException as error:
        sys.exit(str(error))
    sys.stdout.write(READY)
    sys.stdout.flush()
    if not sys.stdin.readline():
        return
    webview.settings["ALLOW_DOWNLOADS"] = True
    window = webview.create_window("Inshrink", sys.argv[1], width=_SIZE[0], height=_SIZE[1], text_select=True)

    def end_with_server() -> None:
        sys.stdin.read()
        window.destroy()

    threading.Thread(target=end_with_server, daemon=True).start()
    webview.start()


if __name__ == "__main__":
    main()
