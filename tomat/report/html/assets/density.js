"use strict";
// Slices and surfaces of periodic densities, from the values in the page (`cell_geometry.js`); plotly draws them.
(function () {
  const {place, surface, frame, picture, atomsNear, repeated, bonds, halfLevel} = cellGeometry;
  const holder = document.querySelector("[data-density]");
  if (!holder) return;
  const {items, near_plane_a: near} = JSON.parse(document.getElementById(holder.dataset.density).textContent);
  const role = (name) => holder.querySelector(`[data-role="${name}"]`);
  const panels = [...holder.querySelectorAll(".slice")].map((slice) => ({
    name: slice.dataset.panel, slice, volume: holder.querySelector(`.volume[data-panel="${slice.dataset.panel}"]`),
  }));
  const largest = (values) => { let top = 0; for (const v of values) if (Math.abs(v) > top) top = Math.abs(v); return top; };

  /** float32 of plotly's base 64, which is little-endian as every machine that runs a browser today. */
  function decoded(array) {
    const text = atob(array.bdata), bytes = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
    return new Float32Array(bytes.buffer);
  }

  const read = new Map();
  function material(number) {
    if (read.has(number)) return read.get(number);
    const item = items[number], density = decoded(item.values.density), grids = {density, prediction: density};
    if (item.values.reference) {
      grids.reference = decoded(item.values.reference);
      grids.difference = density.map((v, i) => v - grids.reference[i]);
      grids.below = grids.difference.map((v) => -v);
    }
    const top = Math.max(largest(density), grids.reference ? largest(grids.reference) : 0) || 1;
    const found = {...item, grids, top, half: halfLevel(grids.reference || density),
      most: grids.difference ? largest(grids.difference) || 1 : 1};
    read.set(number, found);
    return found;
  }

  const BAR = {orientation: "h", y: -0.12, yanchor: "top", thickness: 12, len: 0.95};
  const shortest = (value) => Number(value.toPrecision(2));
  function scale(item, name) {
    if (name === "difference") return {zmin: -item.most, zmax: item.most,
      colorscale: [[0, "#2166ac"], [0.5, "#f4f4f4"], [1, "#b2182b"]], colorbar: BAR};
    const ticks = [0, 0.04, 0.16, 0.36, 0.64, 1].map((part) => shortest(part * item.top));
    return {zmin: 0, zmax: Math.sqrt(item.top), colorscale: "Viridis",
      colorbar: {...BAR, tickvals: ticks.map(Math.sqrt), ticktext: ticks.map(String)}};
  }

  function sliceTraces(item, panel, axis, plane) {
    const values = picture(item, item.grids[panel.name], axis, plane), {x, y} = frame(item, axis);
    const z = panel.name === "difference" ? values : values.map((row) => row.map((v) => (v === null ? null : Math.sqrt(Math.max(v, 0)))));
    const atoms = atomsNear(item, axis, plane, near);
    return [
      {type: "heatmap", x, y, z, customdata: values, hoverongaps: false, hovertemplate: "%{x:.2f}, %{y:.2f} Å: %{customdata:.4g} e/Å³<extra></extra>", ...scale(item, panel.name)},
      {type: "scatter", mode: "markers+text", ...atoms, textposition: "top right", hoverinfo: "text", showlegend: false,
        textfont: {color: panel.name === "difference" ? "#111" : "#fff", size: 11},
        marker: {size: 11, color: "rgba(255,255,255,0.15)", line: {color: panel.name === "difference" ? "#111" : "#fff", width: 1.5}}},
    ];
  }

  /** Surfaces drawn last, so that a slice is dragged without making them anew. */
  const meshes = new Map();
  function kept(item, panel, name, level, values) {
    const key = `${panel} ${name}`, before = meshes.get(key);
    if (before && before.item === item && before.level === level) return before.mesh;
    const mesh = surface(values, item.shape, item.lattice, level);
    meshes.set(key, {item, level, mesh});
    return mesh;
  }

  const COLOURS = ["#c94f4f", "#3b82c4", "#3f9d67", "#dd8a33", "#8a63b0", "#8c8c3b", "#3d9a9e", "#a0522d"];
  function volumeTraces(item, panel, axis, plane, level, difference) {
    const L = item.lattice, traces = [], light = {ambient: 0.55, diffuse: 0.7, specular: 0.15, roughness: 0.7};
    const mesh = (values, at, colour, name) => traces.push({type: "mesh3d", ...kept(item, panel.name, name, at, values), color: colour,
      opacity: 0.55, lighting: light, flatshading: false, hoverinfo: "skip", name});
    if (panel.name === "difference") {
      mesh(item.grids.difference, difference, "#c94f4f", "above");
      mesh(item.grids.below, difference, "#3b82c4", "below");
    } else mesh(item.grids[panel.name], level, "#3d9a9e", "surface");
    const line = (spots, width, colour) => traces.push({type: "scatter3d", mode: "lines", hoverinfo: "skip", showlegend: false,
      x: spots.map((s) => s && s[0]), y: spots.map((s) => s && s[1]), z: spots.map((s) => s && s[2]), line: {width, color: colour}});
    const edges = [];
    for (let n = 0; n < 8; n++) for (const bit of [1, 2, 4]) if (!(n & bit)) {
      const f = (m) => place(L, [m & 1, (m >> 1) & 1, m >> 2]);
      edges.push(f(n), f(n | bit), null);
    }
    line(edges, 2, "#8a929b");
    const [p, q] = [0, 1, 2].filter((n) => n !== axis), share = plane / item.shape[axis];
    line([[0, 0], [1, 0], [1, 1], [0, 1], [0, 0]].map(([s, t]) => { const f = [0, 0, 0]; f[axis] = share; f[p] = s; f[q] = t; return place(L, f); }), 5, "#dd8a33");
    const ends = [[1.08, 0, 0], [0, 1.08, 0], [0, 0, 1.08]].map((f) => place(L, f));
    traces.push({type: "scatter3d", mode: "text", x: ends.map((s) => s[0]), y: ends.map((s) => s[1]), z: ends.map((s) => s[2]),
      text: ["a", "b", "c"], hoverinfo: "skip", showlegend: false});
    const kinds = [...new Set(item.symbols)], shown = repeated(item.frac_coords), spots = shown.map(({f}) => place(L, f));
    const symbols = shown.map(({n}) => item.symbols[n]), radii = shown.map(({n}) => item.radii_a[n]);
    if (spots.length <= MOST_BONDED) line(bonds(spots, radii).flatMap(([m, n]) => [spots[m], spots[n], null]), 5, "#8a929b");
    traces.push({type: "scatter3d", mode: spots.length > MOST_NAMED ? "markers" : "markers+text", x: spots.map((s) => s[0]), y: spots.map((s) => s[1]), z: spots.map((s) => s[2]),
      text: symbols, textposition: "top center", hovertemplate: "%{text} %{x:.3f}, %{y:.3f}, %{z:.3f} Å<extra></extra>", showlegend: false,
      marker: {size: radii.map((r) => 5 + 5 * r), color: symbols.map((s) => COLOURS[kinds.indexOf(s) % COLOURS.length]), line: {width: 1, color: "#444"}}});
    return traces;
  }

  const SLICE = {margin: {l: 36, r: 8, t: 10, b: 70}, xaxis: {ticksuffix: " Å", constrain: "domain", showgrid: false, zeroline: false},
    yaxis: {scaleanchor: "x", constrain: "domain", showgrid: false, zeroline: false}};
  const VOLUME = {margin: {l: 0, r: 0, t: 0, b: 0}, showlegend: false, uirevision: "kept",
    scene: {aspectmode: "data", dragmode: "orbit",
      xaxis: {visible: false}, yaxis: {visible: false}, zaxis: {visible: false}}};

  const MOST_BONDED = 400, MOST_NAMED = 40;

  /** Looked at with c upwards, a little from above, whatever way the lattice was written. */
  function camera(L) {
    const [a, , c] = L, size = Math.hypot(...c), up = c.map((v) => v / size);
    const side = [0, 1, 2].map((k) => a[k] - up[k] * (a[0] * up[0] + a[1] * up[1] + a[2] * up[2]));
    const front = [up[1] * side[2] - up[2] * side[1], up[2] * side[0] - up[0] * side[2], up[0] * side[1] - up[1] * side[0]];
    const unit = (v) => { const l = Math.hypot(...v) || 1; return v.map((w) => w / l); };
    const [s, f] = [unit(side), unit(front)], eye = [0, 1, 2].map((k) => 1.05 * s[k] - 1.7 * f[k] + 0.65 * up[k]);
    const named = (v) => ({x: v[0], y: v[1], z: v[2]});
    return {eye: named(eye), up: named(up)};
  }

  const state = () => ({item: material(role("item") ? Number(role("item").value) : 0),
    axis: Number(holder.querySelector('[data-role="axis"]:checked').value), plane: Number(role("plane").value),
    part: Number(role("level").value), share: role("difference-level") ? Number(role("difference-level").value) : 0});

  function paint(slices, volumes) {
    const {item, axis, plane, part, share} = state();
    // Sliders run on a square-root scale too: most of a cell has a small density.
    const level = part * part * item.top, difference = share * share * item.most;
    const shown = panels.filter((panel) => item.grids[panel.name]);
    panels.forEach((panel) => { panel.slice.parentElement.hidden = !shown.includes(panel); });
    const depth = plane / item.shape[axis];
    role("plane-said").textContent = `${plane} of ${item.shape[axis]}, at ${depth.toFixed(3)} of ${"abc"[axis]}`;
    role("level-said").textContent = `${level.toPrecision(3)} e/Å³`;
    if (role("difference-said")) role("difference-said").textContent = `±${difference.toPrecision(3)} e/Å³`;
    for (const panel of shown) {
      if (slices) Plotly.react(panel.slice, sliceTraces(item, panel, axis, plane), {...SLICE, template: tomat.template()}, tomat.CONFIG);
      if (volumes) {
        Plotly.react(panel.volume, volumeTraces(item, panel, axis, plane, level, difference), {...VOLUME, scene: {...VOLUME.scene, camera: camera(item.lattice)}, template: tomat.template()}, tomat.CONFIG);
      }
      tomat.drawn.add(panel.slice).add(panel.volume);
    }
  }

  let wanted = null;
  function later(slices, volumes) {
    if (wanted) { wanted.slices ||= slices; wanted.volumes ||= volumes; return; }
    wanted = {slices, volumes};
    requestAnimationFrame(() => { const {slices: s, volumes: v} = wanted; wanted = null; paint(s, v); });
  }

  function range() {
    const {item, axis} = state(), slider = role("plane");
    slider.max = item.shape[axis] - 1;
    slider.value = axis === 2 ? item.plane : 0;
  }

  /** A level that encloses half of the electrons, at first. */
  function chooseLevel() {
    const {item} = state();
    role("level").value = Math.sqrt(item.half / item.top);
  }

  let turning = false;
  function turnTogether() {
    for (const panel of panels) panel.volume.on("plotly_relayout", (change) => {
      const camera = change["scene.camera"];
      if (!camera || turning) return;
      turning = true;
      Promise.all(panels.filter((other) => other !== panel && tomat.drawn.has(other.volume))
        .map((other) => Plotly.relayout(other.volume, {"scene.camera": camera}))).finally(() => { turning = false; });
    });
  }

  function begin() {
    range();
    chooseLevel();
    paint(true, true);
    turnTogether();
    role("plane").addEventListener("input", () => later(true, true));
    role("level").addEventListener("input", () => later(false, true));
    if (role("difference-level")) role("difference-level").addEventListener("input", () => later(false, true));
    holder.querySelectorAll('[data-role="axis"]').forEach((box) => box.addEventListener("change", () => { range(); later(true, true); }));
    if (role("item")) role("item").addEventListener("change", () => { range(); chooseLevel(); later(true, true); });
    performance.mark("tomat-density");
  }

  const seen = new IntersectionObserver((entries) => {
    if (entries.some((entry) => entry.isIntersecting)) { seen.disconnect(); begin(); }
  }, {rootMargin: "300px"});
  tomat.started.then(() => seen.observe(holder));
})();
