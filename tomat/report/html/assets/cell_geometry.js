"use strict";
// Slices and surfaces of periodic values in any cell, as numbers. Nothing here knows of a page, so that tests can run it.
const cellGeometry = (function () {
  const dot = (u, v) => u[0] * v[0] + u[1] * v[1] + u[2] * v[2];
  const cross = (u, v) => [u[1] * v[2] - u[2] * v[1], u[2] * v[0] - u[0] * v[2], u[0] * v[1] - u[1] * v[0]];
  const place = (lattice, f) => [0, 1, 2].map((k) => f[0] * lattice[0][k] + f[1] * lattice[1][k] + f[2] * lattice[2][k]);

  /**
   * What of the endless crystal is drawn, as voxels from which and how many: along each axis from the plane of the least
   * mean up to half a cell before the cell, so that what lies around an atom on a face is not cut; and as far beyond its
   * end, if a plane there has nearly as little, else one cell.
   */
  const MOST_DRAWN = 400000;
  function windowOf(values, shape) {
    const means = shape.map((n) => new Float64Array(n)), [na, nb, nc] = shape;
    for (let a = 0, at = 0; a < na; a++) for (let b = 0; b < nb; b++) for (let c = 0; c < nc; c++, at++) {
      means[0][a] += values[at] * na; means[1][b] += values[at] * nb; means[2][c] += values[at] * nc;
    }
    const least = (line, first, step, count) => {
      let best = first;
      for (let k = first, done = 0; done < count; k += step, done++) if (line[(k + line.length) % line.length] < line[(best + line.length) % line.length]) best = k;
      return best;
    };
    const from = [], size = [];
    means.forEach((line) => {
      const n = line.length, start = least(line, 0, -1, Math.ceil(n / 2)), end = least(line, n, 1, Math.ceil(n / 2));
      const apart = line[end % n] - line[(start + n) % n];
      from.push(start);
      size.push(apart < 0.03 * (Math.max(...line) - Math.min(...line)) ? end - start : n);
    });
    return {from, size: size[0] * size[1] * size[2] > MOST_DRAWN ? shape : size};
  }

  /** The surface where periodic values pass a level: each cube of voxels as six tetrahedra round its diagonal (Kuhn). */
  const TETRAHEDRA = [[0, 1, 3, 7], [0, 1, 5, 7], [0, 2, 3, 7], [0, 2, 6, 7], [0, 4, 5, 7], [0, 4, 6, 7]];
  function surface(values, shape, lattice, level, drawn = {from: [0, 0, 0], size: shape}) {
    const [na, nb, nc] = shape, [wa, wb, wc] = drawn.size, mb = wb + 1, mc = wc + 1, count = (wa + 1) * mb * mc;
    const [fa, fb, fc] = drawn.from.map((k, axis) => ((k % shape[axis]) + shape[axis]) % shape[axis]);
    const x = [], y = [], z = [], i = [], j = [], k = [], made = new Map();
    const at = new Float64Array(8), corner = new Float64Array(8), spots = Array.from({length: 8}, () => [0, 0, 0]);
    /** The vertex between two corners, made once, so that neighbouring triangles share it and light falls smoothly. */
    function vertex(p, q) {
      const [a, b] = corner[p] < corner[q] ? [p, q] : [q, p], key = corner[a] * count + corner[b];
      let found = made.get(key);
      if (found === undefined) {
        const t = (level - at[a]) / (at[b] - at[a]), s = spots[a], e = spots[b];
        const spot = place(lattice, [
          (drawn.from[0] + s[0] + t * (e[0] - s[0])) / na, (drawn.from[1] + s[1] + t * (e[1] - s[1])) / nb,
          (drawn.from[2] + s[2] + t * (e[2] - s[2])) / nc,
        ]);
        found = x.push(spot[0]) - 1; y.push(spot[1]); z.push(spot[2]);
        made.set(key, found);
      }
      return found;
    }
    /** A triangle whose front looks from the inside corner to the outside one. */
    function triangle(u, v, w, inside, outside) {
      const one = [x[v] - x[u], y[v] - y[u], z[v] - z[u]], two = [x[w] - x[u], y[w] - y[u], z[w] - z[u]];
      const s = spots[inside], e = spots[outside];
      const way = place(lattice, [(e[0] - s[0]) / na, (e[1] - s[1]) / nb, (e[2] - s[2]) / nc]);
      const front = dot(cross(one, two), way) >= 0;
      i.push(u); j.push(front ? v : w); k.push(front ? w : v);
    }
    for (let a = 0; a < wa; a++) for (let b = 0; b < wb; b++) for (let c = 0; c < wc; c++) {
      let above = 0;
      for (let n = 0; n < 8; n++) {
        const ia = a + (n & 1), ib = b + ((n >> 1) & 1), ic = c + (n >> 2);
        at[n] = values[(((ia + fa) % na) * nb + ((ib + fb) % nb)) * nc + ((ic + fc) % nc)];
        above += at[n] > level;
      }
      if (above === 0 || above === 8) continue;
      for (let n = 0; n < 8; n++) {
        const s = spots[n];
        s[0] = a + (n & 1); s[1] = b + ((n >> 1) & 1); s[2] = c + (n >> 2);
        corner[n] = (s[0] * mb + s[1]) * mc + s[2];
      }
      for (const four of TETRAHEDRA) {
        const inside = four.filter((n) => at[n] > level), outside = four.filter((n) => !(at[n] > level));
        if (inside.length === 1) triangle(...outside.map((n) => vertex(inside[0], n)), inside[0], outside[0]);
        else if (inside.length === 3) triangle(...inside.map((n) => vertex(n, outside[0])), inside[0], outside[0]);
        else if (inside.length === 2) {
          const [p, q] = inside, [r, s] = outside, one = vertex(p, r), two = vertex(q, s);
          triangle(one, vertex(p, s), two, p, r);
          triangle(one, two, vertex(q, r), p, r);
        }
      }
    }
    return {x, y, z, i, j, k};
  }

  /** A plane of the cell, in its own angle, as a picture: `WIDTH` points along its longer side, nothing outside the cell. */
  const WIDTH = 200;
  const edge = 1e-6;  // share of the cell within which a point is on its edge
  function frame(item, axis) {
    const [p, q] = [0, 1, 2].filter((n) => n !== axis), u = item.lattice[p], v = item.lattice[q];
    const along = Math.hypot(...u), across = dot(u, v) / along, up = Math.sqrt(Math.max(dot(v, v) - across * across, 1e-12));
    const left = Math.min(0, across), right = along + Math.max(0, across), step = Math.max(right - left, up) / WIDTH;
    return {p, q, along, across, up, left,
      x: Array.from({length: Math.ceil((right - left) / step) + 1}, (_, n) => left + n * step),
      y: Array.from({length: Math.ceil(up / step) + 1}, (_, n) => n * step)};
  }

  function picture(item, values, axis, plane, shape) {
    const {p, q, along, across, up, x, y} = frame(item, axis), n = item.shape, stride = [n[1] * n[2], n[2], 1];
    const base = plane * stride[axis];
    return y.map((height) => {
      const t = height / up, row = new Array(x.length);
      for (let c = 0; c < x.length; c++) {
        const s = (x[c] - t * across) / along;
        if (s < -edge || s > 1 + edge || t > 1 + edge) { row[c] = null; continue; }
        const fs = Math.max(0, s) * n[p], ft = Math.max(0, t) * n[q], is = Math.floor(fs), it = Math.floor(ft), ws = fs - is, wt = ft - it;
        const i0 = base + (is % n[p]) * stride[p], i1 = base + ((is + 1) % n[p]) * stride[p];
        const j0 = (it % n[q]) * stride[q], j1 = ((it + 1) % n[q]) * stride[q];
        row[c] = (1 - ws) * ((1 - wt) * values[i0 + j0] + wt * values[i0 + j1]) + ws * ((1 - wt) * values[i1 + j0] + wt * values[i1 + j1]);
      }
      return row;
    });
  }

  /** Atoms within `near` angstroms of the plane, straight onto it; on an edge of the cell once for each edge. */
  function atomsNear(item, axis, plane, near) {
    const {p, q, along, across, up} = frame(item, axis), L = item.lattice, normal = cross(L[p], L[q]), size = Math.hypot(...normal);
    const height = dot(L[axis], normal) / size, found = {x: [], y: [], text: []};
    const uu = dot(L[p], L[p]), vv = dot(L[q], L[q]), uv = dot(L[p], L[q]), det = uu * vv - uv * uv;
    item.frac_coords.forEach((f, n) => {
      let away = f[axis] - plane / item.shape[axis];
      away -= Math.round(away);
      if (Math.abs(away * height) > near) return;
      const wu = dot(L[axis], L[p]), wv = dot(L[axis], L[q]);
      const foot = [f[p] + away * (wu * vv - wv * uv) / det, f[q] + away * (wv * uu - wu * uv) / det];
      for (const i of [-1, 0, 1]) for (const j of [-1, 0, 1]) {
        const s = foot[0] - Math.floor(foot[0]) + i, t = foot[1] - Math.floor(foot[1]) + j;
        if (s < -edge || t < -edge || s > 1 + edge || t > 1 + edge) continue;
        found.x.push(s * along + t * across); found.y.push(t * up); found.text.push(item.symbols[n]);
      }
    });
    return found;
  }

  /** Every place of an atom in the cell, its faces, edges and corners with it: which atom, and its fractions. */
  function repeated(fractions) {
    const found = [];
    fractions.forEach((f, n) => {
      const along = f.map((share) => {
        const inside = share - Math.floor(share + edge);
        return inside < edge ? [0, 1] : [inside];
      });
      for (const a of along[0]) for (const b of along[1]) for (const c of along[2]) found.push({n, f: [a, b, c]});
    });
    return found;
  }

  /** Pairs of spots, A, nearer than 1.2 times their covalent radii, and than 1.2 times the nearest neighbour of either. */
  function bonds(spots, radii) {
    const pairs = [], nearest = spots.map(() => Infinity);
    for (let m = 0; m < spots.length; m++) for (let n = 0; n < m; n++) {
      const distance = Math.hypot(...[0, 1, 2].map((k) => spots[m][k] - spots[n][k]));
      nearest[m] = Math.min(nearest[m], distance); nearest[n] = Math.min(nearest[n], distance);
      if (distance < 1.2 * (radii[m] + radii[n])) pairs.push([n, m, distance]);
    }
    return pairs.filter(([n, m, distance]) => distance < 1.2 * Math.min(nearest[n], nearest[m])).map(([n, m]) => [n, m]);
  }

  /** The value that encloses half of all that is positive: between the bonds of a crystal, around the atoms of a salt. */
  function halfLevel(values) {
    const sorted = Float32Array.from(values).sort();
    let sum = 0, part = 0, n = sorted.length;
    for (const v of sorted) sum += Math.max(v, 0);
    while (n > 0 && part < sum / 2) part += Math.max(sorted[--n], 0);
    return n < sorted.length ? sorted[n] : 0;
  }

  return {place, windowOf, surface, frame, picture, atomsNear, repeated, bonds, halfLevel};
})();
