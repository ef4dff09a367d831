"use strict";
// The list of runs, kept fresh; ticked runs are drawn side by side, and a search unfolds to its trials.
(() => {
  const { charts, along, fractions, smooth, number, isFew, fit, clear } = window.raytfChartTools;
  const start = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const rowsBox = byId("rows"), open = new Set(), trials = new Map(), curves = new Map();
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
    if (!values.length) return make("span", {}, "–");
    const low = Math.min(...values), high = Math.max(...values), wide = 96, tall = 24;
    const places = values.map((v, i) => [(3 + i / Math.max(1, values.length - 1) * (wide - 6)).toFixed(1), (tall - 3 - (v - low) / (high - low || 1) * (tall - 6)).toFixed(1)]);
    return make("svg", { svg: true, width: wide, height: tall, role: "img", "aria-label": "from " + number(values[0]) + " to " + number(values[values.length - 1]) },
      ...(isFew(values) ? places.map(([cx, cy]) => make("circle", { svg: true, cx, cy, r: 2.5, fill: "var(--loss)" }))
        : [make("polyline", { svg: true, points: places.join(" "), fill: "none", stroke: "var(--loss)", "stroke-width": 1.5 })]));
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
      tick.addEventListener("input", () => { tick.checked ? picked.add(run.name) : picked.delete(run.name); remember(); compare(); });
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
  // What somebody has chosen is in the address: runs, metrics, and how they are drawn and sorted.
  const address = new URLSearchParams(location.hash.slice(1));
  const controls = { by: "compare-by", smooth: "compare-smooth", log: "compare-log", together: "compare-together", all: "all-settings", show: "filter" };
  const isBox = (control) => control.type === "checkbox";
  const usual = (control) => control.options ? control.options[0].value : control.defaultValue;
  for (const [name, id] of Object.entries(controls)) if (address.has(name)) {
    if (isBox(byId(id))) byId(id).checked = true; else byId(id).value = address.get(name);
  }
  const picked = new Set(address.getAll("run")), metrics = new Set(address.getAll("metric"));
  if (!metrics.size) metrics.add("loss");
  let sorted = address.get("sort") || "";
  const remember = () => {
    const kept = new URLSearchParams();
    for (const name of picked) kept.append("run", name);
    for (const name of metrics) kept.append("metric", name);
    for (const [name, id] of Object.entries(controls)) {
      const control = byId(id), value = isBox(control) ? control.checked && "1" : control.value;
      if (value && value !== usual(control)) kept.set(name, value);
    }
    if (sorted) kept.set("sort", sorted);
    history.replaceState(null, "", "#" + kept);
  };
  addEventListener("hashchange", () => location.reload());
  // A column's name sorts by it, the second time in the other order; what has no value comes last.
  const inOrder = (rows) => {
    const key = sorted.replace(/^-/, ""), sign = sorted.startsWith("-") ? -1 : 1;
    const compared = (a, b) => typeof a === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
    return !key ? rows : [...rows].sort((a, b) => (a[key] === null) - (b[key] === null) || (a[key] === null ? 0 : sign * compared(a[key], b[key])));
  };
  for (const cell of document.querySelectorAll("th[data-sort]")) {
    const button = make("button", { type: "button" }, cell.textContent);
    button.addEventListener("click", () => {
      sorted = sorted === cell.dataset.sort ? "-" + sorted : cell.dataset.sort;
      remember(); draw();
    });
    cell.replaceChildren(button);
  }
  const draw = () => {
    const wanted = byId("filter").value.trim().toLowerCase();
    const shown = inOrder(runs.filter((run) => !wanted || run.name.toLowerCase().includes(wanted) || run.state.includes(wanted)));
    const focus = document.activeElement && document.activeElement.getAttribute("aria-label");
    rowsBox.replaceChildren(...shown.flatMap((run) => open.has(run.name) ? [row(run), inside(run.name)] : [row(run)]));
    if (focus) { const again = rowsBox.querySelector(`[aria-label="${CSS.escape(focus)}"]`); if (again) again.focus(); }
    byId("nothing").hidden = runs.length > 0;
    byId("count").textContent = shown.length === runs.length ? runs.length + (runs.length === 1 ? " run" : " runs") : shown.length + " of " + runs.length;
    for (const cell of document.querySelectorAll("th[data-sort]"))
      cell.setAttribute("aria-sort", sorted === cell.dataset.sort ? "ascending" : sorted === "-" + cell.dataset.sort ? "descending" : "none");
  };
  const curveOf = async (name, isFresh) => {
    if (isFresh || !curves.has(name)) {
      const answer = await fetch("/api/curves/" + path(name));
      if (answer.ok) curves.set(name, await answer.json());
    }
    return curves.get(name);
  };
  // The values of a metric, [x, y], by x: of each step where they are known, or of each epoch.
  const points = ({ steps, epochs }, metric, by, weight) => {
    const isOfSteps = steps.step.length && (metric === "loss" ? by !== "epoch" : steps[metric]);
    const xs = !isOfSteps ? epochs.map((e) => e[by]) : by === "epoch" ? fractions(steps) : steps[by];
    const ys = !isOfSteps ? epochs.map((e) => e[metric]) : metric === "loss" ? smooth(steps.loss, weight) : steps[metric];
    const [x, [y]] = along(xs, [ys]);
    const kept = x.map((v, i) => i).filter((i) => (i === 0 || x[i] !== x[i - 1]) && y[i] !== null);
    return [kept.map((i) => x[i]), kept.map((i) => y[i])];
  };
  const chartOf = (title, lines, by, log, height) => {
    const [xs, ...columns] = uPlot.join(lines.map(({ points }) => points));
    const series = columns.map((values, i) => ({ name: lines[i].name, values: values.map((v) => v === undefined ? null : v), color: lines[i].color, points: xs.length < 80 }));
    return { title, xName: by, xs, series, options: { height, log } };
  };
  // Settings side by side: those that differ, or all.
  const settingsOf = (names, found) => {
    const told = found.map((one) => one ? one.settings : {}), isAll = byId("all-settings").checked;
    const keys = [...new Set(told.flatMap(Object.keys))].filter((key) => key !== "--run" && key !== "--storage");
    const valueOf = (one, key) => key in one ? one[key] : key.startsWith("--") ? "default" : "–";
    const isEqual = (key) => told.every((one) => valueOf(one, key) === valueOf(told[0], key));
    const shown = keys.filter((key) => isAll || !isEqual(key)).sort();
    byId("settings-note").textContent = shown.length ? "" : names.length < 2 ? "Select another run to see where their settings differ." : "Their settings are equal.";
    byId("settings").replaceChildren(...(shown.length ? [make("thead", {}, make("tr", {}, make("th", {}, "setting"), ...names.map((name) => make("th", { scope: "col" }, name)))),
      make("tbody", {}, ...shown.map((key) => make("tr", { class: isEqual(key) && "equal" }, make("th", { scope: "row" }, key), ...told.map((one) => make("td", {}, valueOf(one, key))))))] : []));
  };
  let turn = 0;
  const compare = async (isFresh = false) => {
    const chosen = [...picked].filter((name) => runs.some((run) => run.name === name)), mine = ++turn;
    byId("compare").hidden = !chosen.length;
    if (!chosen.length) { clear(); byId("compare-chart").replaceChildren(); return; }
    const found = await Promise.all(chosen.map((name) => curveOf(name, isFresh)));
    if (mine !== turn) return;  // something else was chosen meanwhile
    const names = [...new Set(["loss", ...runs.filter((run) => picked.has(run.name)).flatMap((run) => run.metrics.flatMap((m) => [m, "val_" + m])), "learning_rate", "gradient_norm"])];
    byId("metrics").replaceChildren(...names.map((name) => {
      const box = make("input", { type: "checkbox" });
      box.checked = metrics.has(name);
      box.addEventListener("input", () => { box.checked ? metrics.add(name) : metrics.delete(name); remember(); compare(); });
      return make("label", {}, box, name);
    }));
    const by = byId("compare-by").value, weight = +byId("compare-smooth").value, isTogether = byId("compare-together").checked;
    const colors = ["loss", "redone", "training", "startup", "finish", "resize", "waiting", "fault"];
    const equal = [], lines = names.filter((name) => metrics.has(name)).map((metric) => {
      const drawn = chosen.flatMap((name, i) => found[i] ? [{ run: name, name, metric, points: points(found[i], metric, by, weight), color: colors[i % 8] }] : []).filter(({ points }) => points[0].length);
      const texts = drawn.map(({ points }) => JSON.stringify(points));
      const groups = [...new Set(texts)].map((text) => drawn.filter((line, i) => texts[i] === text)).filter((group) => group.length > 1);
      equal.push(...groups.map((group) => metric + ": " + group.map((line) => line.run).join(", ")));
      return drawn;
    });
    clear(); byId("compare-chart").replaceChildren();
    const all = lines.flat(), few = lines.filter((group) => group.length);
    byId("equal").textContent = equal.length ? "Equal curves, with dashes: " + equal.join("; ") + "." : "";
    settingsOf(chosen, found);
    if (!all.length) { byId("compare-chart").textContent = metrics.size ? "None of them has " + [...metrics].join(", ") + " yet." : "Select a metric."; return; }
    const log = byId("compare-log").checked;
    charts(byId("compare-chart"), isTogether && few.length > 1
      ? [chartOf(few.map(([line]) => line.metric).join(", "), all.map((line, i) => ({ ...line, name: line.run + ", " + line.metric, color: colors[i % 8] })), by, log, 300)]
      : few.map((group) => chartOf(group[0].metric, group, by, log, few.length > 1 ? 240 : 300)));
    fit();
  };
  for (const id of Object.values(controls)) byId(id).addEventListener("input", () => { remember(); id === "filter" ? draw() : compare(); });
  byId("clear").addEventListener("click", () => { picked.clear(); remember(); draw(); compare(); });
  draw(); compare();
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
