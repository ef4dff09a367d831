"use strict";
// Curves of a run with uPlot: learning and speed, by step, epoch or time. `raytfCharts(data)` may be called again.
// Charts by the same x share their cursor and what is zoomed into.
(() => {
  const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
  const clock = (s) => {
    const t = Math.round(s), p = (n) => String(n).padStart(2, "0");
    return (t >= 3600 ? Math.floor(t / 3600) + ":" + p(Math.floor(t / 60) % 60) : Math.floor(t / 60)) + ":" + p(t % 60);
  };
  const colors = ["loss", "redone", "training", "startup", "finish", "resize", "waiting", "fault"];
  const smooth = (values, weight) => {  // an exponential average that begins without a bias
    let sum = 0, all = 0;
    return values.map((v) => {
      if (v === null || v === undefined) return null;
      sum = sum * weight + v; all = all * weight + 1;
      return sum / all;
    });
  };
  const number = (v) => v === null || v === undefined ? "–" : Math.abs(v) >= 1e5 || (v !== 0 && Math.abs(v) < 1e-3)
    ? v.toExponential(2) : String(+v.toPrecision(4));
  const isKnown = (v) => v !== null && v !== undefined;
  // Fewer points than these are drawn as points alone: a line through them would say more than is known.
  const FEW = 5;
  const WHOLE = [...Array(12).keys()].flatMap((n) => [1, 2, 5].map((times) => times * 10 ** n));
  const isFew = (values) => values.filter(isKnown).length < FEW;
  let drawn = [];

  // Upright lines, [x, color].
  const marks = (lines) => ({ hooks: { draw: [(u) => {
    const { ctx, bbox } = u;
    ctx.save(); ctx.globalAlpha = .45; ctx.lineWidth = devicePixelRatio;
    for (const [x, color] of lines) {
      if (x === null || x < u.scales.x.min || x > u.scales.x.max) continue;
      ctx.strokeStyle = ink(color);
      const at = Math.round(u.valToPos(x, "x", true));
      ctx.beginPath(); ctx.moveTo(at, bbox.top); ctx.lineTo(at, bbox.top + bbox.height); ctx.stroke();
    }
    ctx.restore();
  }] } });

  // Curves that are equal would hide each other: of those that follow an equal one, dashes let it be seen.
  const dashes = (columns) => {
    const texts = columns.map((column) => JSON.stringify(column));
    return texts.map((text, i) => {
      const count = texts.filter((other) => other === text).length, before = texts.slice(0, i).filter((other) => other === text).length;
      return before ? [8 * (count - before), 8 * before] : undefined;
    });
  };
  // Charts side by side share their x axis: columns of each are as long as the longest, with nothing at the ends.
  const widened = (xs, columns, [low, high]) => {
    const before = xs.length && xs[0] > low ? [null] : [], after = xs.length && xs[xs.length - 1] < high ? [null] : [];
    return [[...before.map(() => low), ...xs, ...after.map(() => high)], columns.map((column) => [...before, ...column, ...after])];
  };

  // What is to be drawn: a title, what x is, its values and the series; see `charts`.
  const chart = (box, { title, xName, xs, series, options }) => {
    const figure = document.createElement("figure");
    figure.className = "chart";
    figure.setAttribute("role", "group");
    figure.setAttribute("aria-label", title + " by " + xName);
    box.append(figure);
    const font = "12px system-ui, sans-serif";
    const axis = { stroke: () => ink("soft"), grid: { stroke: () => ink("grid"), width: 1 },
      ticks: { stroke: () => ink("grid"), width: 1 }, font };
    const isLog = options.log && series.some((s) => s.values.some((v) => v > 0));
    if (isLog) series = series.map((s) => ({ ...s, values: s.values.map((v) => v > 0 ? v : null) }));
    const known = series.map((s) => s.values.some(isKnown)), dash = dashes(series.map((s) => s.faint ? s.name : s.values));
    const plot = new uPlot({
      title, width: Math.max(260, figure.clientWidth), height: options.height || 220,
      scales: { x: { time: false }, y: isLog ? { distr: 3 } : options.fromZero ? { range: (u, low, high) => [0, high * 1.1 || 1] } : {} },
      cursor: { sync: { key: "by " + xName, scales: ["x", null] }, points: { size: 6 } },
      legend: { live: true, markers: { dash: (u, i) => dash[i - 1] ? "dashed" : "solid" } },
      plugins: [marks(options.lines || [])],
      axes: [{ ...axis, ...(xName === "epoch" ? {} : { incrs: WHOLE }), values: (u, at) => at.map((v) => xName === "time" ? "+" + clock(v) : v.toLocaleString("en")) },
             { ...axis, size: 62, values: (u, at) => at.map((v) => v === null ? "" : number(v)) }],
      series: [{ label: xName, value: (u, v) => v === null ? "–" : xName === "time" ? "+" + clock(v) : v.toLocaleString("en") },
        ...series.map((s, i) => ({ label: s.name, stroke: () => ink(s.color || colors[i % colors.length]),
          width: s.width || 1.6, alpha: s.faint ? .35 : 1, dash: dash[i], spanGaps: true, show: known[i],
          ...(isFew(s.values) ? { paths: () => null } : s.stepped ? { paths: uPlot.paths.stepped({ align: 1 }) } : {}),
          points: isFew(s.values) ? { show: true, size: i ? 6 : 8, fill: () => ink(s.color || colors[i % colors.length]) }
            : { show: s.points && xs.length < 80, size: 5 }, value: (u, v) => number(v) }))],
    }, [xs, ...series.map((s) => s.values)], figure);
    figure.dataset.dashed = dash.filter(Boolean).length;
    figure.dataset.points = series.filter((s, i) => known[i] && isFew(s.values)).length;
    drawn.push({ plot, figure, key: title + " by " + xName });
  };
  const charts = (box, wanted, others = []) => {
    const ends = [...wanted, ...others.filter(({ xName }) => xName === wanted[0].xName)].flatMap(({ xs }) => xs.length ? [xs[0], xs[xs.length - 1]] : []);
    const range = [Math.min(...ends), Math.max(...ends)];
    for (const one of wanted) {
      const [xs, columns] = widened(one.xs, one.series.map((s) => s.values), range);
      chart(box, { ...one, xs, series: one.series.map((s, i) => ({ ...s, values: columns[i] })) });
    }
  };

  // The same x of rows that may lack it, sorted as uPlot wants them.
  const along = (xs, columns) => {
    const order = xs.map((x, i) => i).filter((i) => xs[i] !== null && xs[i] !== undefined).sort((a, b) => xs[a] - xs[b]);
    return [order.map((i) => xs[i]), columns.map((column) => order.map((i) => column[i] === undefined ? null : column[i]))];
  };
  const fractions = (steps, epochs) => {  // epochs as fractions, so that steps of one do not share a place
    const first = {}, count = {};
    steps.step.forEach((s, i) => { const e = steps.epoch[i]; if (!(e in first)) first[e] = i; count[e] = (count[e] || 0) + 1; });
    return steps.epoch.map((e, i) => e === null ? null : e - 1 + (i - first[e] + 1) / count[e]);
  };

  const draw = (data) => {
    const zoomed = {};  // what somebody looks at more closely stays so
    for (const { plot, key } of drawn) {
      const xs = plot.data[0], { min, max } = plot.scales.x;
      if (xs.length && (min > xs[0] || max < xs[xs.length - 1])) zoomed[key] = { min, max };
      plot.destroy();
    }
    drawn = [];
    const learning = document.getElementById("learning-charts"), speed = document.getElementById("speed-charts");
    if (!learning || !data.curves) return;
    learning.replaceChildren(); if (speed) speed.replaceChildren();
    const by = document.getElementById("by").value, weight = +document.getElementById("smooth").value;
    const log = document.getElementById("log").checked;
    const { steps, epochs, faults } = data.curves;
    const at = (f, by) => [by === "time" ? f[0] : by === "step" ? f[1] : null, f[3]];
    const lines = faults.map((f) => at(f, by)), wanted = [];
    const stepX = by === "epoch" ? fractions(steps) : steps[by];
    const epochX = epochs.map((e) => e[by]);
    const options = { lines, log };
    if (steps.step.length) {
      const raw = steps.loss;
      const [xs, [loss, even]] = along(stepX, [raw, smooth(raw, weight)]);
      const shown = isFew(loss) ? [{ name: "loss", values: loss }]
        : [{ name: "loss, raw", values: loss, faint: true }, { name: "loss", values: even, color: "loss", width: 2 }];
      const vals = epochs.filter((e) => e.val_loss !== undefined && e.val_loss !== null);
      if (vals.length) {  // at the points of the steps nearest to them
        const column = xs.map(() => null);
        for (const e of vals) {
          let best = -1;
          xs.forEach((x, i) => { if (best < 0 || Math.abs(x - e[by]) < Math.abs(xs[best] - e[by])) best = i; });
          if (best >= 0) column[best] = e.val_loss;
        }
        shown.push({ name: "val_loss", values: column, color: "redone", width: 2, points: true });
      }
      wanted.push({ title: "loss", xName: by, xs, series: shown, options });
    }
    for (const name of data.metrics || []) {
      if (name === "loss") continue;
      const columns = [name, "val_" + name].filter((n) => epochs.some((e) => e[n] !== undefined));
      const [xs, values] = along(epochX, columns.map((n) => epochs.map((e) => e[n] === undefined ? null : e[n])));
      if (xs.length) wanted.push({ title: name, xName: by, xs, options,
        series: columns.map((n, i) => ({ name: n, values: values[i], points: true, color: i ? "redone" : "loss" })) });
    }
    for (const [name, title] of [["learning_rate", "learning rate"], ["gradient_norm", "norm of the gradient"]]) {
      if (!steps[name] || !steps[name].some((v) => v !== null)) continue;
      const [xs, [values]] = along(stepX, [steps[name]]);
      wanted.push({ title, xName: by, xs, series: [{ name: title, values, color: "startup" }], options: { ...options, height: 170 } });
    }
    const fast = data.curves.speed, rates = [];
    if (speed && fast.time.length) {
      const way = by === "step" ? "step" : "time";
      const lines = faults.map((f) => at(f, way));
      const [xs, [rate, workers]] = along(fast[way], [fast.samples_per_second, fast.workers]);
      rates.push(
        { title: "samples a second", xName: way, xs, series: [{ name: "samples/s", values: rate, color: "training" }], options: { lines } },
        { title: "workers", xName: way, xs, series: [{ name: "workers", values: workers, color: "startup", stepped: true }],
          options: { lines, height: 150, fromZero: true } });
    } else if (speed) speed.textContent = "Nothing was measured yet.";
    if (wanted.length) charts(learning, wanted, rates);
    if (rates.length) charts(speed, rates, wanted);
    fit();
    for (const { plot, key } of drawn) if (zoomed[key]) plot.setScale("x", zoomed[key]);
  };
  // Only when all are there is it known how wide each may be.
  const fit = () => {
    for (const { plot, figure } of drawn) plot.setSize({ width: Math.max(260, figure.clientWidth), height: plot.height });
  };

  window.raytfCharts = draw;
  window.raytfChartTools = { charts, fit, along, fractions, smooth, number, isFew, clear: () => { for (const { plot } of drawn) plot.destroy(); drawn = []; } };
  let waits = 0;
  addEventListener("resize", () => {
    clearTimeout(waits);
    waits = setTimeout(fit, 120);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { for (const { plot } of drawn) plot.redraw(); });
})();
