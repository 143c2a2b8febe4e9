"use strict";
// Asks the server for what is new: cells of the list, or figures and curves of one run, or of several. After `page.js`.
(function () {
  const {page, api, seconds} = document.body.dataset;
  const told = document.getElementById("told");
  const COLOURS = ["#3b82c4", "#dd8a33", "#3f9d67", "#c94f4f", "#8a63b0", "#8c8c3b", "#3d9a9e"];
  /** @type {{name: string, api: string, version: string, order: string[], curves: object, run: object}[]} */
  const runs = page === "run" ? [{name: "", api, version: ""}]
    : [...document.querySelectorAll("#compared a")].map((a) => ({name: a.textContent, api: a.dataset.api, version: ""}));

  const nameOf = (row) => row.cells[0].querySelector("a").textContent;

  async function list() {
    const answer = await fetch("/");
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    const rows = (from) => new Map([...from.querySelectorAll("tbody tr")].map((row) => [nameOf(row), row]));
    const there = rows(document), now = rows(fresh);
    if (there.size !== now.size || [...now.keys()].some((name) => !there.has(name))) return location.reload();
    for (const [name, row] of now) [...row.cells].forEach((cell, place) => {
      const old = there.get(name).cells[place];
      if (place && old.textContent !== cell.textContent) old.replaceWith(cell.cloneNode(true));
    });
  }

  /** A box before each run, and a link to those that are marked, over one another. */
  function markable() {
    const link = document.createElement("a"), holder = document.createElement("p");
    holder.append(link);
    document.querySelector(".table").before(holder);
    const boxes = [...document.querySelectorAll("tbody tr")].map((row) => {
      const box = Object.assign(document.createElement("input"), {type: "checkbox", value: nameOf(row)});
      box.setAttribute("aria-label", `mark ${box.value}`);
      row.cells[0].prepend(box, " ");
      return box;
    });
    function follow() {
      const names = boxes.filter((box) => box.checked).map((box) => box.value);
      holder.hidden = names.length < 2;
      link.textContent = `Draw ${names.length} runs over one another`;
      link.href = `/compare?${new URLSearchParams(names.map((name) => ["run", name]))}`;
    }
    boxes.forEach((box) => box.addEventListener("change", follow));
    follow();
  }

  function holder(name) {
    const id = `curve ${name}`, found = document.getElementById(id);
    if (found) return found;
    const figure = document.createElement("figure"), caption = document.createElement("figcaption");
    const made = document.createElement("div"), said = document.createElement("p");
    figure.className = "drawn"; made.className = "plot"; said.className = "summary";
    caption.append(Object.assign(document.createElement("b"), {textContent: name}));
    made.id = id; made.style.height = runs.length > 1 ? "300px" : "240px"; made.setAttribute("role", "img");
    figure.append(caption, made, said);
    document.getElementById("curves").append(figure);
    return made;
  }

  /** The points, and over many of them, which are then faint, means; as a run's own page has them. */
  function traces(curve, named, color) {
    const mode = curve.x.length > 1 ? "lines" : "markers", about = {type: "scatter", line: {color}, legendgroup: named};
    const raw = {...about, mode, x: curve.x, y: curve.y, name: named, marker: {color}, showlegend: runs.length > 1};
    if (!curve.mean_of) return [raw];
    const means = {...about, mode: "lines", x: curve.mean_x, y: curve.mean_y, name: runs.length > 1 ? named : `means of ${curve.mean_of}`};
    return [{...raw, opacity: 0.3, showlegend: false}, {...means, showlegend: runs.length > 1}];
  }

  /** One metric of every run that has it; a line of `planned`, where one run alone has a plan. */
  async function draw(name) {
    const made = holder(name), data = [], words = [];
    runs.forEach((run, place) => {
      const curve = run.curves && run.curves[name];
      if (!curve) return;
      const shown = document.createElement("span");
      shown.textContent = run.name;  // Plotly reads some HTML in names.
      data.push(...traces(curve, shown.innerHTML || name, COLOURS[place % COLOURS.length]));
      const last = Number(curve.y[curve.y.length - 1].toPrecision(6)), means = curve.mean_of ? `, means of ${curve.mean_of}` : "";
      const whose = run.name ? `${run.name}: ` : "";
      words.push(`${whose}${curve.x.length} points drawn${means}; ${last} at step ${curve.x[curve.x.length - 1]}`);
    });
    const planned = runs.length === 1 && name === "step_seconds" ? runs[0].run.planned_step_seconds : null;
    if (planned) words.push(`planned ${Number(planned.toPrecision(6))} (dashed)`);
    const said = words.join("; ");
    made.nextElementSibling.textContent = said;
    made.setAttribute("aria-label", `${name}. ${said}`);
    const dashed = {type: "line", xref: "paper", x0: 0, x1: 1, y0: planned, y1: planned, line: {dash: "dash", color: "#8a929b"}};
    const layout = {
      template: tomat.template(), xaxis: {title: {text: "step"}}, yaxis: {}, uirevision: name,
      margin: {t: 34}, shapes: planned ? [dashed] : [], legend: {orientation: "h", y: -0.25},
    };
    await Plotly.react(made, data, layout, tomat.CONFIG);
    tomat.drawn.add(made);
  }

  async function curves() {
    const changed = new Set();
    for (const run of runs) {
      const answer = await fetch(`${run.api}?seen=${encodeURIComponent(run.version)}`);
      const found = await answer.json();
      if (!answer.ok) throw new Error(found.error);
      const shown = document.getElementById("shown");
      if (shown) shown.innerHTML = found.shown_html;
      if (!found.curves) continue;
      Object.assign(run, {version: found.version, curves: found.curves, order: found.order, run: found.run});
      found.order.forEach((name) => changed.add(name));
    }
    for (const name of changed) await draw(name);
  }

  async function look() {
    try {
      if (!document.hidden) {
        await (page === "runs" ? list() : curves());
        if (told) told.textContent = `asked for every ${seconds} s; last at ${new Date().toLocaleTimeString()}`;
      }
    } catch (error) {
      if (told) told.textContent = `no answer: ${error.message}`;
    }
    setTimeout(look, 1000 * seconds);
  }

  if (page === "runs") markable();
  tomat.started.then(page === "runs" ? () => setTimeout(look, 1000 * seconds) : look);
})();
