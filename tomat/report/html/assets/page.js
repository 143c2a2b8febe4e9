"use strict";
// Tables that sort and filter, light and dark, and figures that are drawn by plotly as they come into view.
// This stands before plotly's program, which is text until the page has been painted: to read its megabyte takes longer
// than all else here, and tables and controls answer before that.
const tomat = (function () {
  const root = document.documentElement;
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);

  const CONFIG = {
    displaylogo: false, responsive: true, plotlyServerURL: "",
    modeBarButtonsToRemove: ["sendDataToCloud", "lasso2d", "select2d", "autoScale2d"],
  };

  /** The colours of the page as plotly's template, so that every figure follows light and dark. */
  function template() {
    const grid = colour("--grid"), ink = colour("--ink");
    const axis = {gridcolor: grid, zerolinecolor: grid, linecolor: grid, tickcolor: grid, automargin: true};
    const axis3 = {...axis, backgroundcolor: "rgba(0,0,0,0)", showbackground: false, showspikes: false};
    return {layout: {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", autosize: true,
      font: {color: ink, family: 'system-ui, "DejaVu Sans", sans-serif', size: 12},
      // Its own background would be half of the paper's, which is a transparent black: grey.
      modebar: {bgcolor: "rgba(0,0,0,0)", color: colour("--soft"), activecolor: ink},
      margin: {l: 56, r: 16, t: 12, b: 44}, hoverlabel: {bgcolor: colour("--paper"), bordercolor: grid, font: {color: ink}},
      colorway: ["#3b82c4", "#dd8a33", "#3f9d67", "#c94f4f", "#8a63b0", "#8c8c3b", "#3d9a9e"],
      xaxis: axis, yaxis: axis, scene: {xaxis: axis3, yaxis: axis3, zaxis: axis3, bgcolor: "rgba(0,0,0,0)"},
    }};
  }

  const drawn = new Set();
  function draw(holder) {
    if (drawn.has(holder)) return;
    drawn.add(holder);
    const spec = JSON.parse(document.getElementById(holder.dataset.figure).textContent);
    Plotly.newPlot(holder, spec.data, {...spec.layout, template: template()}, CONFIG)
      .then(() => performance.mark(`tomat-drawn ${holder.id}`));
  }

  function recolour() {
    const button = document.getElementById("theme");
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", isDark() ? "Show the page in light colours" : "Show the page in dark colours");
    for (const holder of drawn) Plotly.relayout(holder, {template: template()});
  }

  function theme() {
    document.getElementById("theme").addEventListener("click", () => {
      root.dataset.theme = isDark() ? "light" : "dark";
      recolour();
    });
    dark.addEventListener("change", recolour);
    recolour();
  }

  function figures() {
    const seen = new IntersectionObserver((entries) => {
      for (const entry of entries) if (entry.isIntersecting) { seen.unobserve(entry.target); draw(entry.target); }
    }, {rootMargin: "200px"});
    const all = document.querySelectorAll("[data-figure]");
    if (all.length) setTimeout(() => draw(all[0]));  // Below the screen too, so that who scrolls finds it there.
    all.forEach((holder) => seen.observe(holder));
    window.addEventListener("beforeprint", () => all.forEach(draw));
    document.querySelectorAll("[data-log]").forEach((box) => box.addEventListener("change", () => {
      const holder = document.getElementById(box.dataset.log);
      draw(holder);
      Plotly.relayout(holder, {"yaxis.type": box.checked ? "log" : "linear"});
    }));
    performance.mark("tomat-figures");
  }

  /** Sorting keeps what is unknown at the end, either way; a second press turns the order round. */
  function sortable(table) {
    const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
      const numeric = head.classList.contains("n"), was = head.getAttribute("aria-sort");
      const order = was === "none" ? (numeric ? "descending" : "ascending") : was === "ascending" ? "descending" : "ascending";
      heads.forEach((other) => other.setAttribute("aria-sort", other === head ? order : "none"));
      const sign = order === "ascending" ? 1 : -1;
      const keyed = [...body.rows].map((row) => {
        const cell = row.cells[column];
        return {row, key: numeric ? ("v" in cell.dataset ? Number(cell.dataset.v) : null) : cell.textContent};
      });
      keyed.sort((a, b) => a.key === null ? (b.key === null ? 0 : 1) : b.key === null ? -1
        : sign * (numeric ? a.key - b.key : a.key.localeCompare(b.key, "en", {numeric: true})));
      body.append(...keyed.map((each) => each.row));
    }));
  }

  function filterable(holder) {
    const field = holder.querySelector('input[type="search"]');
    if (!field) return;
    const said = holder.querySelector("output"), rows = [...holder.querySelector("table").tBodies[0].rows];
    const words = new Map();
    field.addEventListener("input", () => {
      const wanted = field.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      for (const row of rows) {
        if (!words.has(row)) words.set(row, [...row.cells].map((cell) => cell.textContent).join(" ").toLowerCase());
        row.hidden = !wanted.every((word) => words.get(row).includes(word));
        shown += !row.hidden;
      }
      said.textContent = wanted.length ? `${shown} of ${rows.length} rows` : `${rows.length} rows`;
    });
  }

  document.querySelectorAll(".table").forEach((holder) => { sortable(holder.querySelector("table")); filterable(holder); });
  theme();
  performance.mark("tomat-ready");
  /**
   * Read plotly's program, which stands in the page as text; where it stands empty, the program is there already.
   *
   * As a file of the page's own it is compiled beside the page, not in its way, and with the first line, which Chromium
   * knows since 136, compiled whole: to run it holds the page up for 0.14 s, without that line for 0.45 s, as a script in
   * the page for 0.35 s and before it is painted (the program of a plan, Chromium 150, two slow cores).
   */
  function readPlotly() {
    const text = document.getElementById("plotly-program").textContent;
    if (!text.trim()) return Promise.resolve();
    return new Promise((resolve) => {
      const program = document.createElement("script");
      program.src = URL.createObjectURL(new Blob(["//# allFunctionsCalledOnLoad\n", text], {type: "text/javascript"}));
      program.addEventListener("load", () => { URL.revokeObjectURL(program.src); resolve(); });
      program.addEventListener("error", () => {  // The page is shown inside another, whose policy refuses such files.
        const inPage = document.createElement("script");
        inPage.textContent = text;
        document.head.append(inPage);
        resolve();
      });
      document.head.append(program);
    });
  }

  /** Resolved once plotly is there. */
  const loaded = new Promise((resolve) => document.addEventListener("DOMContentLoaded", resolve));
  const painted = loaded.then(() => new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve))));
  const started = painted.then(readPlotly).then(figures);
  return {template, drawn, started, CONFIG};
})();
