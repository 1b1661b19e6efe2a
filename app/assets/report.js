// Figures follow the colour scheme of the browser; `templates` has one for each.
const dark = matchMedia("(prefers-color-scheme: dark)");
const paint = () => document.querySelectorAll(".plotly-graph-div").forEach(
  one => Plotly.relayout(one, {template: templates[dark.matches ? "dark" : "light"]}));
dark.addEventListener("change", paint);
if (dark.matches) paint();
