"use strict";
// Asks the server for what is new: cells of the list, or figures and curves of one run. After `page.js`.
(function () {
  const {page, api, seconds} = document.body.dataset;
  const told = document.getElementById("told");
  let version = "";

  async function list() {
    const answer = await fetch("/");
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    const rows = (from) => new Map([...from.querySelectorAll("tbody tr")].map((row) => [row.cells[0].textContent, row]));
    const there = rows(document), now = rows(fresh);
    if (there.size !== now.size || [...now.keys()].some((name) => !there.has(name))) return location.reload();
    for (const [name, row] of now) [...row.cells].forEach((cell, place) => {
      const old = there.get(name).cells[place];
      if (place && old.textContent !== cell.textContent) old.replaceWith(cell.cloneNode(true));
    });
  }

  function holder(name) {
    const id = `curve ${name}`, found = document.getElementById(id);
    if (found) return found;
    const figure = document.createElement("figure"), caption = document.createElement("figcaption");
    const made = document.createElement("div"), said = document.createElement("p");
    figure.className = "drawn"; made.className = "plot"; said.className = "summary";
    caption.append(Object.assign(document.createElement("b"), {textContent: name}));
    made.id = id; made.style.height = "240px"; made.setAttribute("role", "img");
    figure.append(caption, made, said);
    document.getElementById("curves").append(figure);
    return made;
  }

  /** A line of `planned`, where it is a number. */
  async function draw(name, curve, planned) {
    const made = holder(name), last = Number(curve.y[curve.y.length - 1].toPrecision(6));
    const plan = planned ? `; planned ${Number(planned.toPrecision(6))} (dashed)` : "";
    const said = `${curve.x.length} points drawn; ${last} at step ${curve.x[curve.x.length - 1]}${plan}`;
    made.nextElementSibling.textContent = said;
    made.setAttribute("aria-label", `${name}. ${said}`);
    const data = [{type: "scatter", mode: curve.x.length > 1 ? "lines" : "markers", x: curve.x, y: curve.y, name}];
    const dashed = {type: "line", xref: "paper", x0: 0, x1: 1, y0: planned, y1: planned, line: {dash: "dash", color: "#8a929b"}};
    const layout = {
      template: tomat.template(), xaxis: {title: {text: "step"}}, yaxis: {}, uirevision: name,
      margin: {t: 34}, shapes: planned ? [dashed] : [],
    };
    await Plotly.react(made, data, layout, tomat.CONFIG);
    tomat.drawn.add(made);
  }

  async function run() {
    const answer = await fetch(`${api}?seen=${encodeURIComponent(version)}`);
    const found = await answer.json();
    if (!answer.ok) throw new Error(found.error);
    document.getElementById("shown").innerHTML = found.shown_html;
    if (!found.curves) return;
    version = found.version;
    for (const name of found.order) {
      await draw(name, found.curves[name], name === "step_seconds" ? found.run.planned_step_seconds : null);
    }
  }

  async function look() {
    try {
      if (!document.hidden) {
        await (page === "run" ? run() : list());
        if (told) told.textContent = `asked for every ${seconds} s; last at ${new Date().toLocaleTimeString()}`;
      }
    } catch (error) {
      if (told) told.textContent = `no answer: ${error.message}`;
    }
    setTimeout(look, 1000 * seconds);
  }

  tomat.started.then(page === "run" ? look : () => setTimeout(look, 1000 * seconds));
})();
