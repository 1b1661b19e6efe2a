// Tells which cell of a Plotly heatmap was clicked, or the name of which row, and marks cells in it: Streamlit
// does so for points alone.

const MARK_PIXELS = 2;

const running = new WeakMap();

export default function ({ data, parentElement, setTriggerValue }) {
  running.get(parentElement)?.();
  const around = parentElement.closest("[data-testid=stVerticalBlock]") ?? document.body;
  let { rows, column } = data;
  let chart = null;

  const layer = document.createElement("div");
  layer.className = "cell-marks";
  layer.style.cssText = "position: absolute; overflow: hidden; pointer-events: none";

  function mark() {
    const panel = chart.querySelector(".nsewdrag[data-subplot=xy]");
    const whole = chart.querySelector(".svg-container");
    if (!panel || !whole) return;
    const [box, outer] = [panel.getBoundingClientRect(), whole.getBoundingClientRect()];
    layer.style.left = `${box.left - outer.left - MARK_PIXELS}px`;
    layer.style.top = `${box.top - outer.top - MARK_PIXELS}px`;
    layer.style.width = `${box.width + 2 * MARK_PIXELS}px`;
    layer.style.height = `${box.height + 2 * MARK_PIXELS}px`;
    const [x0, x1] = chart.layout.xaxis.range;
    const [y1, y0] = chart.layout.yaxis.range; // from the bottom up
    const across = (x) => ((x - x0) / (x1 - x0)) * box.width;
    const down = (y) => ((y - y0) / (y1 - y0)) * box.height;
    layer.replaceChildren(
      ...rows.map(([first, last]) => {
        const cell = document.createElement("div");
        const [left, right] = [column - 0.5, column + 0.5].map(across);
        const [top, bottom] = [first - 0.5, last + 0.5].map(down);
        cell.style.cssText =
          `position: absolute; left: ${left + MARK_PIXELS}px; top: ${top + MARK_PIXELS}px; ` +
          `width: ${right - left}px; height: ${bottom - top}px; outline: ${MARK_PIXELS}px solid ${data.colour}`;
        cell.dataset.cell = `${first},${last},${column}`;
        return cell;
      }),
    );
    if (layer.parentElement !== whole) whole.append(layer);
  }

  function clicked(event) {
    const point = event.points.find((one) => one.data.type === "heatmap");
    if (!point) return;
    const [row, picked] = point.pointNumber;
    [rows, column] = [[[row, row]], picked];
    mark();
    setTriggerValue("cell", [row, picked]);
  }

  function named(event) {
    setTriggerValue("name", event.index);
  }

  function leave() {
    chart?.removeListener?.("plotly_click", clicked);
    chart?.removeListener?.("plotly_clickannotation", named);
    chart?.removeListener?.("plotly_afterplot", mark);
    layer.remove();
  }

  function follow() {
    const found = around.querySelector(`.st-key-${data.chart} .js-plotly-plot`);
    if (found === chart || !found?.on) return;
    leave();
    chart = found;
    chart.on("plotly_click", clicked);
    chart.on("plotly_clickannotation", named);
    chart.on("plotly_afterplot", mark);
    chart.dataset.cells = "told";
    mark();
  }

  // Another figure is another element, and comes when Plotly has drawn it.
  const observer = new MutationObserver(follow);
  observer.observe(around, { childList: true, subtree: true });
  follow();

  const stop = () => {
    observer.disconnect();
    leave();
    running.delete(parentElement);
  };
  running.set(parentElement, stop);
  return stop;
}
