// Tells which cell of a Plotly heatmap was clicked, or the name of which row, and marks cells in it: Streamlit
// does so for points alone. Before each name stands a box that ticks the row. Keys: arrows move the picked
// cell, p ticks its row, u undoes, / goes to the filter, ? lists them.

const MARK_PIXELS = 2;
const MOVES = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };

const running = new WeakMap();
const picked = new WeakMap(); // What was picked and not yet answered: later messages repeat it.

export default function ({ data, parentElement, setTriggerValue }) {
  running.get(parentElement)?.();
  const around = parentElement.closest("[data-testid=stVerticalBlock]") ?? document.body;
  let state = picked.get(parentElement);
  if (!state || data.answered >= state.number) {
    const { answered, rows, column, ticked } = data;
    state = { number: answered, rows, column, ticked: new Set(ticked), cell: null, ticks: false };
    picked.set(parentElement, state);
  }
  let chart = null;

  const layer = document.createElement("div");
  layer.className = "cell-marks";
  layer.style.cssText = "position: absolute; overflow: hidden; pointer-events: none";
  const boxes = document.createElement("div");
  boxes.className = "cell-boxes";
  boxes.style.cssText = "position: absolute; left: 0; width: 18px; overflow: hidden";

  function mark() {
    const panel = chart.querySelector(".nsewdrag[data-subplot=xy]");
    const whole = chart.querySelector(".svg-container");
    if (!panel || !whole) return;
    const [box, outer] = [panel.getBoundingClientRect(), whole.getBoundingClientRect()];
    const top = box.top - outer.top;
    layer.style.left = `${box.left - outer.left - MARK_PIXELS}px`;
    layer.style.top = `${top - MARK_PIXELS}px`;
    layer.style.width = `${box.width + 2 * MARK_PIXELS}px`;
    layer.style.height = `${box.height + 2 * MARK_PIXELS}px`;
    boxes.style.top = `${top}px`;
    boxes.style.height = `${box.height}px`;
    const [x0, x1] = chart.layout.xaxis.range;
    const [y1, y0] = chart.layout.yaxis.range; // from the bottom up
    const across = (x) => ((x - x0) / (x1 - x0)) * box.width;
    const down = (y) => ((y - y0) / (y1 - y0)) * box.height;
    layer.replaceChildren(
      ...state.rows.map(([first, last]) => {
        const cell = document.createElement("div");
        const [left, right] = [data.edges[state.column], data.edges[state.column + 1]].map(across);
        const [above, below] = [first - 0.5, last + 0.5].map(down);
        cell.style.cssText =
          `position: absolute; left: ${left + MARK_PIXELS}px; top: ${above + MARK_PIXELS}px; ` +
          `width: ${right - left}px; height: ${below - above}px; outline: ${MARK_PIXELS}px solid ${data.colour}`;
        cell.dataset.cell = `${first},${last},${state.column}`;
        return cell;
      }),
    );
    data.names.forEach((name, row) => {
      const tick = boxes.children[row] ?? document.createElement("input");
      const height = down(row + 0.5) - down(row - 0.5);
      tick.type = "checkbox";
      tick.checked = state.ticked.has(row);
      tick.ariaLabel = tick.title = `Draw ${name} as a line`;
      tick.style.cssText =
        `position: absolute; left: 2px; margin: 0; width: 13px; height: 13px; cursor: pointer; ` +
        `accent-color: ${data.accent}; top: ${down(row - 0.5) + (height - 13) / 2}px`;
      tick.onchange = () => toggle(row);
      if (!tick.parentElement) boxes.append(tick);
    });
    if (layer.parentElement !== whole) whole.append(layer);
    if (boxes.parentElement !== whole) whole.append(boxes);
  }

  function tell() {
    mark();
    const { cell, ticks, ticked } = state;
    setTriggerValue("picked", [++state.number, cell, ticks ? [...ticked] : null]);
  }

  function pick(row, place) {
    Object.assign(state, { rows: [[row, row]], column: place, cell: [row, place] });
    tell();
  }

  function toggle(row) {
    if (!state.ticked.delete(row)) state.ticked.add(row);
    state.ticks = true;
    tell();
  }

  function clicked(event) {
    const point = event.points.find((one) => one.data.type === "heatmap");
    if (point) pick(...point.pointNumber);
  }

  function named(event) {
    setTriggerValue("name", event.index);
  }

  function pressed(event) {
    const typing = event.target.closest?.("input:not([type=checkbox]), textarea, select, [role=combobox], [role=slider]");
    if (typing || event.ctrlKey || event.metaKey || event.altKey || !chart?.isConnected) return;
    const move = MOVES[event.key];
    if (move && state.rows.length && !event.target.closest?.("[role=radiogroup], [data-testid=stDataFrame]")) {
      const row = state.rows[0][0] + move[0];
      let place = state.column + move[1];
      while (data.gaps.includes(place)) place += move[1];
      if (row < 0 || row >= data.n_rows || place < 0 || place > data.edges.length - 2) return;
      pick(row, place);
    } else if (event.key === "p" && state.rows.length) {
      toggle(state.rows[0][0]);
    } else if (event.key === "u") {
      document.querySelector(".st-key-undo button:not(:disabled)")?.click();
    } else if (event.key === "?") {
      document.querySelector(".st-key-keys button")?.click();
    } else if (event.key === "/") {
      document.querySelector(".st-key-row_filter input")?.focus();
    } else return;
    event.preventDefault();
  }

  function leave() {
    chart?.removeListener?.("plotly_click", clicked);
    chart?.removeListener?.("plotly_clickannotation", named);
    chart?.removeListener?.("plotly_afterplot", mark);
    layer.remove();
    boxes.remove();
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
  document.addEventListener("keydown", pressed);
  follow();

  // Streamlit may call this late, when a later call has replaced this one.
  const stop = () => {
    observer.disconnect();
    document.removeEventListener("keydown", pressed);
    leave();
    if (running.get(parentElement) === stop) running.delete(parentElement);
  };
  running.set(parentElement, stop);
  return stop;
}
