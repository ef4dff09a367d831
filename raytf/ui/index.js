"use strict";
// The list of runs, kept fresh; ticked runs are drawn side by side, and a search unfolds to its trials.
(() => {
  const { along, smooth, number, fit, clear } = window.raytfChartTools;
  const start = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const rowsBox = byId("rows"), picked = new Set(), open = new Set(), trials = new Map(), curves = new Map();
  let runs = start.runs;
  byId("place").textContent = start.place;
  const make = (tag, attributes = {}, ...inner) => {
    const element = document.createElementNS(attributes.svg ? "http://www.w3.org/2000/svg" : "http://www.w3.org/1999/xhtml", tag);
    for (const [name, value] of Object.entries(attributes)) if (name !== "svg" && value !== null && value !== false) element.setAttribute(name, value);
    element.append(...inner.filter((each) => each !== null && each !== undefined));
    return element;
  };
  const path = (name) => name.split("/").map(encodeURIComponent).join("/");
  const age = (seconds) => {
    for (const [unit, word] of [[86400, "d"], [3600, "h"], [60, "min"]]) if (seconds >= unit) return Math.floor(seconds / unit) + " " + word + " ago";
    return Math.max(0, Math.floor(seconds)) + " s ago";
  };
  const spark = (values) => {
    if (values.length < 2) return make("span", {}, "–");
    const low = Math.min(...values), high = Math.max(...values), wide = 96, tall = 24;
    const points = values.map((v, i) => (i / (values.length - 1) * wide).toFixed(1) + "," + (tall - 2 - (v - low) / (high - low || 1) * (tall - 4)).toFixed(1)).join(" ");
    return make("svg", { svg: true, width: wide, height: tall, role: "img", "aria-label": "from " + number(values[0]) + " to " + number(values[values.length - 1]) },
      make("polyline", { svg: true, points, fill: "none", stroke: "var(--loss)", "stroke-width": 1.5 }));
  };
  const stepOf = (run) => run.trials !== null ? run.trials + (run.trials === 1 ? " trial" : " trials")
    : run.step === null ? "–" : run.step.toLocaleString("en") + (run.total && run.total !== run.step ? " of " + run.total.toLocaleString("en") : "");
  const row = (run) => {
    const isSearch = run.trials !== null;
    const tick = isSearch ? make("button", { type: "button", "aria-expanded": String(open.has(run.name)), "aria-label": "trials of " + run.name }, open.has(run.name) ? "▾" : "▸")
      : make("input", { type: "checkbox", "aria-label": "draw " + run.name });
    if (isSearch) tick.addEventListener("click", () => unfold(run.name));
    else {
      tick.checked = picked.has(run.name);
      tick.addEventListener("input", () => { tick.checked ? picked.add(run.name) : picked.delete(run.name); compare(); });
    }
    const name = isSearch ? make("b", {}, run.name) : make("a", { href: "/run/" + path(run.name) }, run.name);
    const why = run.why || run.problems.join("; ");
    return make("tr", { "data-run": run.name }, make("td", {}, tick), make("td", { class: "why" }, name, why ? make("div", { class: "soft" }, why) : null),
      make("td", {}, make("span", { class: "state " + run.state }, run.state)), make("td", { class: "n", "data-label": "step" }, stepOf(run)),
      make("td", { "data-label": "metric" }, run.metric || "–"), make("td", { class: "n", "data-label": "best" }, number(run.best)),
      make("td", { class: "n", "data-label": "last" }, number(run.last)), make("td", {}, spark(run.curve)),
      make("td", { class: "age", "data-age": run.modified }, age(Date.now() / 1000 - run.modified)));
  };
  // Parallel coordinates: an axis for each searched flag and one for the value; each trial is a line.
  const parallel = (found) => {
    const names = [...new Set(found.flatMap((t) => Object.keys(t.parameters)))].filter((n) => new Set(found.map((t) => JSON.stringify(t.parameters[n]))).size > 1);
    const axes = [...names.map((n) => [n, found.map((t) => t.parameters[n])]), ["value", found.map((t) => t.value)]];
    const wide = Math.max(300, 170 * axes.length), tall = 190;
    const places = axes.map(([, values]) => {
      const known = values.filter((v) => v !== null && v !== undefined);
      if (known.length && known.every((v) => typeof v === "number")) {
        const low = Math.min(...known), high = Math.max(...known), isLog = low > 0 && high / low >= 50;
        const of = (v) => isLog ? Math.log(v) : v, span = of(high) - of(low) || 1;
        return { at: (v) => typeof v === "number" ? 1 - (of(v) - of(low)) / span : null, ends: [number(high), number(low)] };
      }
      const kinds = [...new Set(known.map(String))].sort();
      return { at: (v) => kinds.length > 1 ? kinds.indexOf(String(v)) / (kinds.length - 1) : .5, ends: [kinds[0] || "", kinds[kinds.length - 1] || ""] };
    });
    const x = (i) => 50 + i * (wide - 100) / Math.max(1, axes.length - 1), y = (share) => 34 + share * (tall - 62);
    const values = found.map((t) => t.value).filter((v) => v !== null), low = Math.min(...values), high = Math.max(...values);
    const svg = make("svg", { svg: true, viewBox: `0 0 ${wide} ${tall}`, width: wide, height: tall, role: "img", "aria-label": found.length + " trials by what was searched and what came of it" });
    found.forEach((trial) => {
      const points = axes.map(([, all], i) => [i, places[i].at(all[found.indexOf(trial)])]).filter(([, share]) => share !== null).map(([i, share]) => x(i).toFixed(1) + "," + y(share).toFixed(1)).join(" ");
      const share = trial.value === null || high === low ? .5 : (trial.value - low) / (high - low);
      svg.append(make("polyline", { svg: true, points, fill: "none", stroke: "var(--loss)", "stroke-width": 1.8, opacity: (.25 + .7 * share).toFixed(2) },
        make("title", { svg: true }, "trial " + trial.number + ": " + number(trial.value))));
    });
    axes.forEach(([name], i) => svg.append(
      make("line", { svg: true, x1: x(i), x2: x(i), y1: y(0), y2: y(1), stroke: "var(--soft)" }),
      make("text", { svg: true, x: x(i), y: 14, "text-anchor": "middle", fill: "var(--ink)", "font-size": 13, "font-weight": 600 }, name),
      make("text", { svg: true, x: x(i), y: 28, "text-anchor": "middle", fill: "var(--soft)", "font-size": 11 }, places[i].ends[0]),
      make("text", { svg: true, x: x(i), y: tall - 8, "text-anchor": "middle", fill: "var(--soft)", "font-size": 11 }, places[i].ends[1])));
    return make("div", { class: "scroll" }, svg);
  };
  const inside = (name) => {
    const found = trials.get(name);
    const cell = make("td", { colspan: 9 });
    if (!found) cell.append("reading its trials …");
    else if (!found.length) cell.append("No trial is over yet.");
    else {
      cell.append(parallel(found));
      const list = make("ul", { class: "trials" });
      for (const t of found) list.append(make("li", {}, make("a", { href: "/run/" + path(name) + "/trial-" + String(t.number).padStart(3, "0") }, "trial " + t.number), " " + t.outcome + ", " + number(t.value) + ": " + Object.entries(t.parameters).map(([k, v]) => k + " " + v).join(", ")));
      cell.append(list);
    }
    return make("tr", { class: "inside" }, cell);
  };
  const unfold = async (name) => {
    if (open.has(name)) { open.delete(name); draw(); return; }
    open.add(name); draw();
    const answer = await fetch("/api/search/" + path(name));
    if (answer.ok) trials.set(name, (await answer.json()).trials);
    draw();
  };
  const draw = () => {
    const wanted = byId("filter").value.trim().toLowerCase();
    const shown = runs.filter((run) => !wanted || run.name.toLowerCase().includes(wanted) || run.state.includes(wanted));
    const focus = document.activeElement && document.activeElement.getAttribute("aria-label");
    rowsBox.replaceChildren(...shown.flatMap((run) => open.has(run.name) ? [row(run), inside(run.name)] : [row(run)]));
    if (focus) { const again = rowsBox.querySelector(`[aria-label="${CSS.escape(focus)}"]`); if (again) again.focus(); }
    byId("nothing").hidden = runs.length > 0;
    byId("count").textContent = shown.length === runs.length ? runs.length + (runs.length === 1 ? " run" : " runs") : shown.length + " of " + runs.length;
  };
  const curveOf = async (name, isFresh) => {
    if (isFresh || !curves.has(name)) {
      const answer = await fetch("/api/curves/" + path(name));
      if (answer.ok) curves.set(name, await answer.json());
    }
    return curves.get(name);
  };
  const compare = async (isFresh = false) => {
    const chosen = [...picked].filter((name) => runs.some((run) => run.name === name));
    byId("compare").hidden = !chosen.length;
    if (!chosen.length) { clear(); byId("compare-chart").replaceChildren(); return; }
    const metrics = [...new Set(["loss", ...runs.filter((run) => picked.has(run.name)).flatMap((run) => run.metrics.flatMap((m) => [m, "val_" + m]))])];
    const select = byId("metric"), before = select.value;
    select.replaceChildren(...metrics.map((m) => make("option", {}, m)));
    if (metrics.includes(before)) select.value = before;
    const all = await Promise.all(chosen.map((name) => curveOf(name, isFresh)));
    const by = byId("compare-by").value, weight = +byId("compare-smooth").value, metric = select.value;
    const tables = [], names = [];
    all.forEach((found, i) => {
      if (!found) return;
      let xs = found.epochs.map((e) => e[by]), ys = found.epochs.map((e) => e[metric] === undefined ? null : e[metric]);
      if (metric === "loss" && found.steps.step.length && by !== "epoch") { xs = found.steps[by]; ys = smooth(found.steps.loss, weight); }
      const [x, [y]] = along(xs, [ys]);
      const seen = new Set(), kept = x.map((v, at) => [v, y[at]]).filter(([v]) => !seen.has(v) && seen.add(v));
      if (kept.some(([, v]) => v !== null)) { tables.push([kept.map(([v]) => v), kept.map(([, v]) => v)]); names.push(chosen[i]); }
    });
    clear(); byId("compare-chart").replaceChildren();
    if (!tables.length) { byId("compare-chart").textContent = "None of them has " + metric + " yet."; return; }
    const [xs, ...columns] = uPlot.join(tables);
    window.raytfChart(byId("compare-chart"), metric, by, xs, columns.map((values, i) => ({ name: names[i], values, points: xs.length < 80 })), { height: 300 });
    fit();
  };
  for (const id of ["metric", "compare-by", "compare-smooth"]) byId(id).addEventListener("input", () => compare());
  byId("filter").addEventListener("input", draw);
  byId("clear").addEventListener("click", () => { picked.clear(); draw(); compare(); });
  draw();
  setInterval(() => { for (const cell of rowsBox.querySelectorAll("[data-age]")) cell.textContent = age(Date.now() / 1000 - +cell.dataset.age); }, 1000);
  let first = true;
  new EventSource("/events").onmessage = async () => {
    if (first && runs.length) { first = false; return; }
    first = false;
    const answer = await fetch("/api/runs");
    if (!answer.ok) return;
    runs = await answer.json(); draw();
    if (picked.size) compare(true);
  };
})();
