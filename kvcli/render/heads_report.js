// Draws the page of `kvcli profile-heads` from the JSON data in it. Text is inserted as text only, never as markup.
"use strict";
(() => {
  const D = JSON.parse(document.getElementById("data").textContent);
  const P = D.policy, S = D.strip, L = D.layers, K = D.kv_heads, NS = "http://www.w3.org/2000/svg";
  const byId = (id) => document.getElementById(id);
  const state = {
    show: P ? "policy" : "retrieval", mode: P && P.keep !== null ? "keep" : "recovery",
    keep: P ? P.keep ?? P.kept : 1, recovery: P ? P.recovery ?? 0.8 : 1, criterion: P ? P.criterion : "",
    chosen: P ? P.chosen.map((row) => row.slice()) : null, at: null, only: false,
  };

  // ---- helpers ----

  function el(name, attributes, ...children) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes || {})) {
      if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
      else if (key === "style") Object.assign(made.style, value);
      else made.setAttribute(key, value);
    }
    made.append(...children);
    return made;
  }
  function svg(name, attributes, text) {
    const made = document.createElementNS(NS, name);
    for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  }
  const clamp = (x) => Math.min(1, Math.max(0, x));
  const mean = (xs) => (xs.length ? xs.reduce((a, b) => a + b, 0) / xs.length : 0);
  const figure = (x) => (Math.abs(x) >= 10 ? x.toFixed(1) : x.toFixed(3));
  const percent = (x) => `${(100 * x).toFixed(1)} %`;
  function size(n) {
    const units = ["KiB", "MiB", "GiB", "TiB"];
    let i = 0;
    for (n /= 1024; n >= 999.5 && i < 3; i++) n /= 1024;
    return `${n.toFixed(n < 99.95 && i ? 1 : 0)} ${units[i]}`;
  }
  function mixed(ramp, x) {
    const at = clamp(x) * (ramp.length - 1), i = Math.min(ramp.length - 2, Math.floor(at)), part = at - i;
    const rgb = [1, 3, 5].map((c) => {
      const [a, b] = [ramp[i], ramp[i + 1]].map((colour) => parseInt(colour.slice(c, c + 2), 16));
      return Math.round(a + (b - a) * part);
    });
    return `rgb(${rgb.join(",")})`;
  }

  // ---- policy of each head ----

  const seen = [];
  for (let l = 0; l < L; l++) for (let k = 0; k < K; k++) if (P && P.chosen[l][k] >= 0) seen.push([l, k]);
  const forced = new Set(D.forced.map(([l, k]) => `${l},${k}`));
  const last = P ? P.candidates.length - 1 : 0;
  const cost = (l, k, c) => P.cost[c][l][k];
  const mass = (l, k, c, by) => P.mass[by || state.criterion][c][l][k];
  const whole = P ? seen.reduce((sum, [l, k]) => sum + cost(l, k, last), 0) : 1;

  function hull(l, k) {
    const order = P.candidates.map((_, c) => c);
    order.sort((a, b) => cost(l, k, a) - cost(l, k, b) || mass(l, k, b) - mass(l, k, a));
    const slope = (a, b) => (mass(l, k, b) - mass(l, k, a)) / (cost(l, k, b) - cost(l, k, a));
    const found = [order[0]];
    for (const c of order.slice(1)) {
      const top = found[found.length - 1];
      if (mass(l, k, c) <= mass(l, k, top) || cost(l, k, c) === cost(l, k, top)) continue;
      while (found.length > 1 && slope(found.at(-1), c) >= slope(found.at(-2), found.at(-1))) found.pop();
      found.push(c);
    }
    return found;
  }
  function path() {  // the greedy knapsack from the cheapest choice: each upgrade that a larger budget allows
    const chosen = P.chosen.map((row) => row.map(() => -1)), ups = [];
    let spent = 0;
    for (const [l, k] of seen) {
      if (forced.has(`${l},${k}`)) { chosen[l][k] = last; spent += cost(l, k, last); continue; }
      const h = hull(l, k);
      chosen[l][k] = h[0];
      spent += cost(l, k, h[0]);
      for (let i = 1; i < h.length; i++) {
        const tokens = cost(l, k, h[i]) - cost(l, k, h[i - 1]), gain = mass(l, k, h[i]) - mass(l, k, h[i - 1]);
        ups.push({ l, k, c: h[i], i, tokens, rate: gain / tokens, gain });
      }
    }
    ups.sort((a, b) => b.rate - a.rate || a.l - b.l || a.k - b.k || a.i - b.i);
    return { chosen, spent, ups };
  }
  function byBudget(keep) {
    if (keep >= 1) return P.chosen.map((row) => row.map((c) => (c < 0 ? c : last)));
    const { chosen, spent, ups } = path();
    let left = keep * whole - spent;
    for (const up of ups) {
      if (up.tokens > left) break;
      left -= up.tokens;
      chosen[up.l][up.k] = up.c;
    }
    for (let best = null; (best = filler(chosen, left)); left -= best.tokens) chosen[best.l][best.k] = best.c;
    return chosen;
  }
  function filler(chosen, left) {  // the best upgrade within the rest of the budget
    let best = null;
    for (const [l, k] of seen) {
      const now = chosen[l][k];
      for (let c = last; c >= 0; c--) {
        const tokens = cost(l, k, c) - cost(l, k, now), gain = mass(l, k, c) - mass(l, k, now);
        if (gain > 0 && tokens > 0 && tokens <= left && (!best || gain / tokens > best.rate)) best = { l, k, c, tokens, rate: gain / tokens };
      }
    }
    return best;
  }
  function byLevel(level) {
    const chosen = P.chosen.map((row) => row.map(() => -1));
    for (const [l, k] of seen) {
      let best = last;
      if (level < 1 && !forced.has(`${l},${k}`))
        for (let c = 0; c <= last; c++)
          if (mass(l, k, c) >= level && cost(l, k, c) < cost(l, k, best)) best = c;
      chosen[l][k] = best;
    }
    return chosen;
  }
  const keptBy = (chosen) => seen.reduce((sum, [l, k]) => sum + cost(l, k, chosen[l][k]), 0) / whole;
  const recoveredBy = (chosen) => mean(seen.map(([l, k]) => mass(l, k, chosen[l][k])));
  const share = (l, k) => (state.chosen[l][k] < 0 ? 1 : cost(l, k, state.chosen[l][k]) / cost(l, k, last));

  // ---- the map ----

  let size1 = 34;  // size of a cell in pixels, so that the layers fit on the page
  function measure() {
    size1 = Math.max(15, Math.min(34, Math.floor((byId("map").clientWidth - 58) / L)));
  }
  function hint(box) {  // marks content beyond the edge
    if (box.scrollWidth > box.clientWidth + 1) box.append(el("p", { class: "note hint" }, "more to the right: scroll →"));
  }
  const most = (name) =>
    D.shares.includes(name) ? 1 : Math.max(...D.scalars[name].flat().map(Math.abs)) || 1;
  const probed = new Set(D.probed);
  function level(name, l, k) {
    return clamp(D.scalars[name][l][k] / most(name));
  }
  function colours(l, k) {
    if (state.show !== "policy") return [mixed(D.ramp, level(state.show, l, k)), ""];
    const c = state.chosen[l][k];
    const letter = c < 0 ? "W" : D.letters[c];
    return [D.palette[letter][0], letter, D.palette[letter][1]];
  }
  function words(l, k) {
    const said = [`layer ${l}, head ${k}`];
    if (!probed.has(l)) return `${said[0]}: not looked at`;
    if (P) said.push(state.chosen[l][k] < 0 ? "sees a window only" : P.candidates[state.chosen[l][k]]);
    if (state.show !== "policy") said.push(`${D.words[state.show]}: ${figure(D.scalars[state.show][l][k])}`);
    return said.join(" · ");
  }
  function axes(drawn, left, top, height) {
    const step = Math.ceil(24 / size1);
    for (let l = 0; l < L; l += step)
      drawn.append(svg("text", { x: left + (l + 0.5) * size1, y: top + height + 14, class: "axis", "text-anchor": "middle" }, l));
    drawn.append(svg("text", { x: left + (L * size1) / 2, y: top + height + 30, class: "axis", "text-anchor": "middle" }, "layer"));
  }
  function grid(colour, title, margin) {
    const left = 46, top = margin ? 46 : 6, width = left + L * size1 + 12, height = top + K * size1 + 38;
    const drawn = svg("svg", { width, height, class: "heads", tabindex: 0, role: "img" });
    drawn.append(svg("title", {}, "KV heads down, layers across; arrow keys move"));
    for (let k = 0; k < K; k++)
      drawn.append(svg("text", { x: left - 8, y: top + (k + 0.65) * size1, class: "axis", "text-anchor": "end" }, `h${k}`));
    for (let l = 0; l < L; l++) {
      if (margin) {
        const part = clamp(margin(l)), tall = Math.max(1, 34 * part);
        const bar = svg("rect", { x: left + l * size1 + 2, y: top - 6 - tall, width: size1 - 4, height: tall, class: "margin" });
        bar.append(svg("title", {}, `layer ${l}: ${percent(part)}`));
        drawn.append(bar);
      }
      for (let k = 0; k < K; k++) {
        const [fill, letter, ink] = probed.has(l) ? colour(l, k) : ["var(--grid)", ""];
        const x = left + l * size1, y = top + k * size1;
        const cell = svg("rect", { x, y, width: size1, height: size1, rx: 3, fill, class: "cell", "data-l": l, "data-k": k });
        cell.append(svg("title", {}, title(l, k)));
        drawn.append(cell);
        if (letter && size1 >= 17)
          drawn.append(svg("text", { x: x + size1 / 2, y: y + size1 / 2 + 4, fill: ink, class: "letter", style: `fill:${ink}` }, letter));
      }
    }
    axes(drawn, left, top, K * size1);
    return drawn;
  }
  function drawMap() {
    const margin = (l) => mean([...Array(K).keys()].map((k) => (state.show === "policy" ? share(l, k) : level(state.show, l, k))));
    const drawn = grid(colours, words, margin);
    drawn.addEventListener("click", (event) => {
      const cell = event.target.closest("rect.cell");
      if (cell) pick(+cell.dataset.l, +cell.dataset.k);
    });
    drawn.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
      if (!step) return;
      event.preventDefault();
      const [l, k] = state.at || [0, 0];
      pick(Math.min(L - 1, Math.max(0, l + step[0])), Math.min(K - 1, Math.max(0, k + step[1])));
      byId("map").firstChild.focus();
    });
    byId("map").replaceChildren(drawn);
    hint(byId("map"));
    mark();
    drawScale();
  }
  function mark() {
    for (const cell of document.querySelectorAll("#map rect.cell"))
      cell.classList.toggle("picked", Boolean(state.at) && +cell.dataset.l === state.at[0] && +cell.dataset.k === state.at[1]);
  }
  function drawScale() {
    const scale = byId("scale");
    if (state.show === "policy") {
      const used = new Set(state.chosen.flat());
      const keys = P.candidates.map((name, c) => [c, D.letters[c], name]).concat([[-1, "W", "sees a window only"]]);
      scale.replaceChildren(...keys.filter(([c]) => used.has(c)).map(([, letter, name]) =>
        el("span", {}, el("span", { class: "swatch", style: { background: D.palette[letter][0] } }), ` ${letter} ${name}`)));
      scale.append(el("span", { class: "note" }, "bars: share of tokens kept by the layer"));
    } else {
      const bar = el("span", { class: "bar", style: { background: `linear-gradient(90deg, ${D.ramp.join(",")})` } });
      scale.replaceChildren("0", bar, figure(most(state.show)), el("span", { class: "note" }, `${D.words[state.show]}; bars: mean of the layer`));
    }
  }
  function drawControls() {
    const names = [...(P ? ["policy"] : []), ...Object.keys(D.scalars)];
    const choose = el("select", { onchange: (event) => { state.show = event.target.value; drawMap(); } });
    for (const name of names) choose.append(el("option", { value: name }, D.words[name]));
    choose.value = state.show;
    byId("controls").replaceChildren(el("label", {}, "colour by", choose), el("span", { class: "note" }, "pick a head for its figures"));
  }

  // ---- shares by layer ----

  function drawShares() {
    const left = 46, top = 6, tall = 130;
    const drawn = svg("svg", { width: left + L * size1 + 12, height: top + tall + 38, class: "heads", role: "img" });
    for (const part of [0, 0.5, 1])
      drawn.append(svg("text", { x: left - 8, y: top + tall * (1 - part) + 4, class: "axis", "text-anchor": "end" }, `${100 * part} %`));
    for (let l = 0; l < L; l++) {
      let y = top + tall;
      for (let c = -1; c <= last; c++) {
        const n = state.chosen[l].filter((x) => x === c).length;
        if (!n || !probed.has(l)) continue;
        const height = (tall * n) / K, letter = c < 0 ? "W" : D.letters[c];
        y -= height;
        const bar = svg("rect", { x: left + l * size1 + 1, y, width: size1 - 2, height, fill: D.palette[letter][0] });
        bar.append(svg("title", {}, `layer ${l}: ${n} of ${K} heads ${c < 0 ? "see a window only" : P.candidates[c]}`));
        drawn.append(bar);
      }
    }
    axes(drawn, left, top, tall);
    byId("shares").replaceChildren(drawn);
    hint(byId("shares"));
  }

  // ---- the frontier ----

  function points() {
    const { chosen, spent, ups } = path();
    let x = spent, y = seen.reduce((sum, [l, k]) => sum + mass(l, k, chosen[l][k]), 0);
    const budget = [[x / whole, y / seen.length]];
    for (const up of ups) budget.push([(x += up.tokens) / whole, (y += up.gain) / seen.length]);
    const levels = [...Array(101).keys()].map((i) => byLevel(i / 100)).map((one) => [keptBy(one), recoveredBy(one)]);
    return { budget, levels };
  }
  let drawnPoints = null;
  function drawFrontier() {
    if (!drawnPoints) drawnPoints = points();
    const { budget, levels } = drawnPoints, H = 300;
    const low = Math.floor(10 * Math.min(0.9, ...budget.map((p) => p[1]), ...levels.map((p) => p[1]))) / 10;
    const px = (x) => 1000 * x, py = (y) => H * (1 - (y - low) / (1 - low));
    const lines = svg("svg", { viewBox: `0 0 1000 ${H}`, preserveAspectRatio: "none", role: "img" });
    lines.append(svg("title", {}, "share of tokens kept, across; mass recovered, up"));
    for (let i = 0; i <= 4; i++) {
      const y = H * (i / 4), x = 250 * i;
      lines.append(svg("line", { x1: 0, x2: 1000, y1: y, y2: y, class: "grid", "vector-effect": "non-scaling-stroke" }));
      lines.append(svg("line", { x1: x, x2: x, y1: 0, y2: H, class: "grid", "vector-effect": "non-scaling-stroke" }));
    }
    for (const [name, line] of [["level", levels], ["budget", budget]])
      lines.append(svg("polyline", { points: line.map(([x, y]) => `${px(x)},${py(y)}`).join(" "), class: `path ${name}`, "vector-effect": "non-scaling-stroke" }));
    const frame = el("div", { style: { position: "relative", height: `${H}px`, margin: "8px 0 30px" } }, lines);
    for (let i = 0; i <= 4; i++) {
      const tick = { position: "absolute", font: "12px system-ui", color: "var(--soft)", whiteSpace: "nowrap" };
      frame.append(el("span", { style: { ...tick, right: "calc(100% + 8px)", top: `${25 * i}%`, transform: "translateY(-50%)" } }, (1 - (i / 4) * (1 - low)).toFixed(2)));
      frame.append(el("span", { style: { ...tick, left: `${25 * i}%`, top: "calc(100% + 6px)", transform: "translateX(-50%)" } }, `${25 * i} %`));
    }
    const x = keptBy(state.chosen), y = recoveredBy(state.chosen);
    frame.append(el("span", { id: "dot", style: { position: "absolute", left: `${100 * x}%`, top: `${(100 * py(y)) / H}%`, width: "13px", height: "13px",
      borderRadius: "50%", background: "var(--ink)", border: "2px solid var(--card)", transform: "translate(-50%, -50%)" } }));
    const key = el("p", { class: "legendtext" }, "across: share of tokens kept · up: mass recovered, mean over heads (",
      state.criterion, ") · solid: one budget shared by all heads · dashed: each head by the same recovery");
    byId("plot").replaceChildren(frame, key);
    const bytes = D.kv[0].whole * x;
    byId("says").textContent = `${percent(x)} of tokens kept, ${y.toFixed(3)} recovered, about ${size(bytes)} of ${size(D.kv[0].whole)} at ${D.kv[0].context.toLocaleString("en")} tokens`;
  }
  function buildFrontier() {
    const slider = el("input", { type: "range", min: 0, max: 1, step: 0.01, "aria-label": "share kept, or recovery", oninput: (event) => {
      state[state.mode] = +event.target.value;
      rechoose();
    } });
    const value = el("output", { id: "value" });
    const mode = el("select", { "aria-label": "what the slider sets", onchange: (event) => { state.mode = event.target.value; slider.value = state[state.mode]; rechoose(); } },
      el("option", { value: "keep" }, "budget: tokens kept"), el("option", { value: "recovery" }, "recovery of each head"));
    const by = el("select", { "aria-label": "criterion", onchange: (event) => { state.criterion = event.target.value; drawnPoints = null; rechoose(); } });
    for (const name of Object.keys(P.mass)) by.append(el("option", { value: name }, { cvar10: "worst tenth of rows", mean: "mean of rows", p05: "5th percentile" }[name] || name));
    mode.value = state.mode;
    by.value = state.criterion;
    slider.value = state[state.mode];
    byId("frontier").replaceChildren(el("div", { class: "row" }, mode, slider, value, by), el("p", { id: "says", class: "says" }), el("div", { id: "plot", class: "plot" }));
    value.textContent = (+slider.value).toFixed(2);
  }
  let waiting = false;
  function rechoose() {
    byId("value").textContent = state[state.mode].toFixed(2);
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      state.chosen = state.mode === "keep" ? byBudget(state.keep) : byLevel(state.recovery);
      drawAll();
    });
  }

  // ---- one head ----

  function bars(rows) {
    const top = Math.max(...rows.map((row) => row[1]), 1e-9);
    const box = el("div", { class: "lines" });
    for (const [name, value, said, now] of rows)
      box.append(el("span", { class: now ? "k now" : "k" }, name), el("i", { style: { width: `${100 * Math.max(0, value) / top}%` } }), el("span", { class: "v" }, said ?? figure(value)));
    return box;
  }
  function pick(l, k) {
    state.at = [l, k];
    mark();
    drawOne();
    if (S && P) drawStrip();
  }
  function drawOne() {
    const one = byId("one");
    if (!state.at) { one.replaceChildren(el("p", { class: "note" }, "Pick a head in the map.")); return; }
    const [l, k] = state.at, parts = [];
    const figures = Object.keys(D.scalars).map((name) => [D.words[name], level(name, l, k), figure(D.scalars[name][l][k])]);
    if (D.offsets) figures.push([`needle read at offset`, 0, String(D.offsets[l][k])]);
    parts.push(el("div", {}, el("h3", {}, `layer ${l}, head ${k}`), bars(figures)));
    if (P && state.chosen[l][k] >= 0) {
      const rows = P.candidates.map((name, c) => [name, mass(l, k, c), `${figure(mass(l, k, c))} for ${percent(cost(l, k, c) / cost(l, k, last))}`, c === state.chosen[l][k]]);
      parts.push(el("div", {}, el("h3", {}, "mass recovered by each policy, and what it keeps"), bars(rows)));
    }
    const G = D.query_heads / K;
    for (const [name, table] of Object.entries(D.query))
      if (G > 1) parts.push(el("div", {}, el("h3", {}, `its ${G} query heads: ${name === "recovered" ? "recovered by the cheapest policy" : D.words[name] || name}`),
        bars([...Array(G).keys()].map((g) => [`q${k * G + g}`, table[l][k * G + g]]))));
    if (D.distances && D.distances[l][k].length)
      parts.push(el("div", {}, el("h3", {}, "mass by distance, tokens"), bars(D.distances[l][k].map((value, i) =>
        [i < 2 ? String(i) : i === 2 ? "2–3" : `${2 ** (i - 1)}–${2 ** i - 1}`, value]))));
    if (D.kinds) parts.push(el("div", {}, el("h3", {}, "mass by kind of token"), bars(Object.entries(D.kinds).map(([name, table]) => [name, table[l][k]]))));
    if (D.top && D.top[l][k].length)
      parts.push(el("div", {}, el("h3", {}, "tokens it looks at most"), bars(D.top[l][k].map(([at, text, value]) => [`${at} “${text.trim() || text.replace(/\s/g, "␣")}”`, value, percent(value)]))));
    one.replaceChildren(el("div", { class: "twofold" }, ...parts));
  }

  // ---- tokens ----

  const frequent = {};
  if (S) for (const [l, rows] of Object.entries(S.frequent)) frequent[l] = rows.map((row) => Uint8Array.from(atob(row), (c) => c.charCodeAt(0)));
  function survives(l, k, into) {
    const c = state.chosen[l][k], words = c < 0 ? [] : P.candidates[c].split("+"), all = c === last || c < 0;
    const punct = words.includes("punct"), near = words.includes("local") ? P.local : P.guard, often = words.includes("frequent") && frequent[l];
    for (let b = 0; b < S.texts.length; b++) {
      const at = b * S.width, age = S.tokens - 1 - at, kind = S.kinds[b];
      const stays = all || at < P.sinks || kind === 1 || kind === 4 || age < near || (punct && S.punct.includes(kind));
      into[b] += stays ? 1 : often ? frequent[l][k][b] / 255 : 0;
    }
  }
  function drawStrip() {
    const kept = new Float32Array(S.texts.length), heads = state.only && state.at ? [state.at] : seen;
    for (const [l, k] of heads) if (probed.has(l)) survives(l, k, kept);
    const box = byId("tokens"), spans = box.children;
    if (!spans.length) for (const text of S.texts) box.append(el("span", {}, text));
    for (let b = 0; b < S.texts.length; b++) {
      const part = heads.length ? kept[b] / heads.length : 0, at = b * S.width;
      spans[b].style.background = `color-mix(in srgb, var(--c0) ${Math.round(55 * part)}%, transparent)`;
      spans[b].style.opacity = part < 0.02 ? 0.45 : 1;
      spans[b].title = `${S.width > 1 ? `tokens ${at} to ${Math.min(S.tokens, at + S.width) - 1}` : `token ${at}`}: kept by ${kept[b].toFixed(S.width > 1 ? 1 : 0)} of ${heads.length} heads`;
    }
    const whom = state.only && state.at ? `layer ${state.at[0]}, head ${state.at[1]}` : `${heads.length} heads`;
    byId("whom").textContent = `darker: kept by more of ${whom}${S.width > 1 ? `; ${S.width} tokens a piece` : ""}`;
  }
  function buildStrip() {
    const only = el("input", { type: "checkbox", onchange: (event) => { state.only = event.target.checked; drawStrip(); } });
    byId("strip").replaceChildren(el("label", {}, only, " only the head picked above"), el("p", { id: "whom", class: "legendtext" }), el("div", { id: "tokens", class: "tokens" }));
  }

  // ---- comparison with another run ----

  function drawCompare() {
    const table = D.compare.difference, top = Math.max(...table.flat().map(Math.abs)) || 1;
    const ramp = ["#2166ac", "#f7f7f7", "#b2182b"];
    const drawn = grid((l, k) => [mixed(ramp, 0.5 + table[l][k] / (2 * top)), ""], (l, k) => `layer ${l}, head ${k}: ${table[l][k].toFixed(3)}`, null);
    const rho = D.compare.spearman === null ? "no ranks to compare" : `rank correlation ${D.compare.spearman.toFixed(2)}`;
    byId("compare").replaceChildren(drawn, el("p", { class: "legendtext" }, `${D.words[D.compare.scalar] || D.compare.scalar}, this run minus the other: blue −${figure(top)}, red +${figure(top)} · ${rho}`));
  }

  // ---- all ----

  function drawAll() {
    measure();
    drawMap();
    drawOne();
    if (P) { drawShares(); drawFrontier(); }
    if (S && P) drawStrip();
  }
  if (D.suggest.full.length) state.at = D.suggest.full[0];
  drawControls();
  if (P) buildFrontier();
  if (S) buildStrip();
  drawAll();
  if (D.compare) drawCompare();
  for (const table of document.querySelectorAll(".scroll > table")) hint(table.parentElement);
  addEventListener("resize", drawAll);
})();
