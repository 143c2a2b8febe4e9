"use strict";
// Slices and surfaces of periodic values in any cell, as numbers. Nothing here knows of a page, so that tests can run it.
const cellGeometry = (function () {
  const dot = (u, v) => u[0] * v[0] + u[1] * v[1] + u[2] * v[2];
  const cross = (u, v) => [u[1] * v[2] - u[2] * v[1], u[2] * v[0] - u[0] * v[2], u[0] * v[1] - u[1] * v[0]];
  const place = (lattice, f) => [0, 1, 2].map((k) => f[0] * lattice[0][k] + f[1] * lattice[1][k] + f[2] * lattice[2][k]);

  /**
   * The surface where periodic values pass a level: each cube of voxels as six tetrahedra round its diagonal (Kuhn). A piece
   * that is closed is drawn whole with its middle in the cell, and on the opposite face too where that is on one; a piece
   * that goes on from cell to cell ends, along those axes, where the density is least within half a cell before the cell's
   * face, and a cell later.
   */
  const TETRAHEDRA = [[0, 1, 3, 7], [0, 1, 5, 7], [0, 2, 3, 7], [0, 2, 6, 7], [0, 4, 5, 7], [0, 4, 6, 7]];
  const ON_A_FACE = 0.02, AXES = [0, 1, 2];
  function leastPlanes(values, shape) {
    const means = shape.map((n) => new Float64Array(n)), [na, nb, nc] = shape;
    for (let a = 0, at = 0; a < na; a++) for (let b = 0; b < nb; b++) for (let c = 0; c < nc; c++, at++) {
      means[0][a] += values[at] * na; means[1][b] += values[at] * nb; means[2][c] += values[at] * nc;
    }
    return means.map((line) => {
      let best = 0;
      for (let k = 1; 2 * k <= line.length; k++) if (line[line.length - k] < line[(line.length - best) % line.length]) best = k;
      return -best;
    });
  }

  function surface(values, shape, lattice, level) {
    const [na, nb, nc] = shape, at = new Float64Array(8), made = new Map(), home = [0, 0, 0];
    const start = leastPlanes(values, shape), [fa, fb, fc] = start.map((k, axis) => k + shape[axis]);
    // Of each vertex its place, shares of the cell; of each corner of a triangle 8 times its vertex, and in bits along which
    // axes it is that of the next cell.
    const spots = [], corners = [];
    // Each vertex hangs on one of its piece, the first one on itself, so many cells away; along which axes a piece has no end.
    const parent = [], apart = [], endless = [], away = [0, 0, 0];
    /** The first vertex of a piece; leaves the cells from it to this one in `away`. */
    function first(v) {
      away[0] = away[1] = away[2] = 0;
      while (parent[v] !== v) {
        const p = parent[v];
        for (let k = 0; k < 3; k++) { apart[3 * v + k] += apart[3 * p + k]; away[k] += apart[3 * v + k]; }
        v = parent[v] = parent[p];
      }
      return v;
    }
    /** Two corners of a triangle are of one piece. */
    function join(u, v) {
      const one = first(u >> 3), x = away[0], y = away[1], z = away[2], two = first(v >> 3);
      const gap = [x - away[0] + (v & 1) - (u & 1), y - away[1] + (v >> 1 & 1) - (u >> 1 & 1), z - away[2] + (v >> 2 & 1) - (u >> 2 & 1)];
      if (one !== two) {
        parent[two] = one;
        for (let k = 0; k < 3; k++) apart[3 * two + k] = gap[k];
      }
      endless[one] |= one === two ? (gap[0] && 1) | (gap[1] && 2) | (gap[2] && 4) : endless[two];
    }
    /** The vertex between two corners of the cube at `home`, made once, so that light falls smoothly. */
    function vertex(m, n) {
      const p = m & n, way = m ^ n;  // the corner nearer to the cube's origin, and the axes along which the other is beyond
      let a = home[0] + (p & 1), b = home[1] + (p >> 1 & 1), c = home[2] + (p >> 2), next = 0;
      if (a === na) { a = 0; next |= 1; }
      if (b === nb) { b = 0; next |= 2; }
      if (c === nc) { c = 0; next |= 4; }
      const key = ((a * nb + b) * nc + c) * 8 + way;
      let found = made.get(key);
      if (found === undefined) {
        const t = (level - at[p]) / (at[p | way] - at[p]);
        spots.push((start[0] + a + t * (way & 1)) / na, (start[1] + b + t * (way >> 1 & 1)) / nb, (start[2] + c + t * (way >> 2)) / nc);
        found = parent.push(parent.length) - 1;
        apart.push(0, 0, 0); endless.push(0);
        made.set(key, found);
      }
      return 8 * found + next;
    }
    const share = (corner, k) => spots[3 * (corner >> 3) + k] + (corner >> k & 1);
    const right = dot(cross(lattice[0], lattice[1]), lattice[2]) > 0;
    /** A triangle whose front looks from the inside corner to the outside one. */
    function triangle(u, v, w, inside, outside) {
      // The volume that both sides and the way out span has the sign of that in shares of the cell, where its vectors are
      // right-handed.
      const [ua, ub, uc] = [share(u, 0), share(u, 1), share(u, 2)];
      const one = [share(v, 0) - ua, share(v, 1) - ub, share(v, 2) - uc], two = [share(w, 0) - ua, share(w, 1) - ub, share(w, 2) - uc];
      const way = [((outside & 1) - (inside & 1)) / na, ((outside >> 1 & 1) - (inside >> 1 & 1)) / nb, ((outside >> 2) - (inside >> 2)) / nc];
      if (dot(cross(one, two), way) >= 0 === right) corners.push(u, v, w); else corners.push(u, w, v);
      join(u, v); join(u, w);
    }
    for (let a = 0; a < na; a++) for (let b = 0; b < nb; b++) for (let c = 0; c < nc; c++) {
      let above = 0;
      for (let n = 0; n < 8; n++) {
        at[n] = values[(((a + fa + (n & 1)) % na) * nb + ((b + fb + ((n >> 1) & 1)) % nb)) * nc + ((c + fc + (n >> 2)) % nc)];
        above += at[n] > level;
      }
      if (above === 0 || above === 8) continue;
      home[0] = a; home[1] = b; home[2] = c;
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
    // Of each piece the sum of its vertices' places and their number, then the cells to which it is moved.
    const pieces = new Map();
    for (let v = 0; v < parent.length; v++) {
      const root = first(v), sum = pieces.get(root) || pieces.set(root, [0, 0, 0, 0]).get(root);
      for (let k = 0; k < 3; k++) sum[k] += spots[3 * v + k] + away[k];
      sum[3]++;
    }
    pieces.forEach((sum, root) => {
      let moves = [[]];
      for (const k of AXES) {
        const middle = sum[k] / sum[3], whole = Math.floor(middle + ON_A_FACE);
        const along = endless[root] >> k & 1 ? [0] : middle - whole < ON_A_FACE ? [-whole, 1 - whole] : [-whole];
        moves = moves.flatMap((move) => along.map((m) => [...move, m]));
      }
      pieces.set(root, moves);
    });
    const x = [], y = [], z = [], faces = [[], [], []], drawn = new Map(), [A, B, C] = lattice;
    for (let n = 0; n < corners.length; n += 3) {
      const root = first(corners[n] >> 3), here = AXES.map((k) => (endless[root] >> k & 1 ? 0 : away[k] - (corners[n] >> k & 1)));
      for (const move of pieces.get(root)) for (let m = 0; m < 3; m++) {
        const corner = corners[n + m], v = corner >> 3, a = here[0] + move[0] + (corner & 1);
        const b = here[1] + move[1] + (corner >> 1 & 1), c = here[2] + move[2] + (corner >> 2 & 1);
        const key = ((v * 64 + a + 32) * 64 + b + 32) * 64 + c + 32;
        let found = drawn.get(key);
        if (found === undefined) {
          const f = spots[3 * v] + a, g = spots[3 * v + 1] + b, h = spots[3 * v + 2] + c;
          found = x.push(f * A[0] + g * B[0] + h * C[0]) - 1;
          y.push(f * A[1] + g * B[1] + h * C[1]); z.push(f * A[2] + g * B[2] + h * C[2]);
          drawn.set(key, found);
        }
        faces[m].push(found);
      }
    }
    return {x, y, z, i: faces[0], j: faces[1], k: faces[2]};
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

  return {place, surface, frame, picture, atomsNear, repeated, bonds, halfLevel};
})();
