"use strict";
// What a pointer tells at the timeline, the curves' controls, which the address keeps, and sections that fold, of which a
// phone shows the first. `raytfPage(data)` may be called again.
window.raytfFolded = new Map();
window.raytfPage = (data) => {
  const address = new URLSearchParams(location.hash.slice(1));
  for (const id of ["by", "smooth", "log"]) {
    const control = document.getElementById(id), key = id === "log" ? "checked" : "value";
    if (!control) continue;
    if (address.has(id)) control[key] = id === "log" || address.get(id);
    control.addEventListener("input", () => {
      if (control[key]) address.set(id, control[key]); else address.delete(id);
      // A page within another one, as trackers show it, may have an address that it cannot change.
      try { history.replaceState(null, "", "#" + address); } catch { /* the choice is drawn all the same */ }
      window.raytfCharts(data);
    });
  }
  for (const fold of document.querySelectorAll("section > details")) {
    const name = fold.parentElement.id, before = window.raytfFolded.get(name);
    fold.open = before === undefined ? innerWidth > 640 || fold === document.querySelector("section > details") : before;
    fold.addEventListener("toggle", () => { window.raytfFolded.set(name, fold.open); window.raytfChartTools.fit(); });
  }
  window.raytfCharts(data);
  const box = document.querySelector(".timeline");
  if (!box) return;
  const area = box.querySelector(".area");
  const cross = box.appendChild(Object.assign(document.createElement("div"), { className: "cross", hidden: true }));
  const tip = box.appendChild(Object.assign(document.createElement("div"), { className: "tip", hidden: true }));
  const clock = (s) => {
    const t = Math.round(s), p = (n) => String(n).padStart(2, "0");
    return (t >= 3600 ? Math.floor(t / 3600) + ":" + p(Math.floor(t / 60) % 60) : Math.floor(t / 60)) + ":" + p(t % 60);
  };
  const last = (rows, t) => {  // the last row that began before t, by bisection
    let low = 0, high = rows.length;
    while (low < high) { const mid = (low + high) >> 1; if (rows[mid][0] <= t) low = mid + 1; else high = mid; }
    return low ? rows[low - 1] : null;
  };
  const line = (name, value) => {
    const row = document.createElement("p");
    row.append(name + " ", Object.assign(document.createElement("b"), { textContent: value }));
    return row;
  };
  const show = (event) => {
    const at = area.getBoundingClientRect(), whole = box.getBoundingClientRect();
    const share = (event.clientX - at.left) / at.width;
    if (share < 0 || share > 1) return hide();
    const t = share * data.seconds, near = 6 / at.width * data.seconds;
    const rows = [line("at", "+" + clock(t))];
    const band = last(data.bands, t), world = last(data.world, t), loss = last(data.loss, t);
    if (band) rows[0].append(", " + band[1]);
    if (world) rows.push(line("workers", world[1]));
    if (loss) rows.push(line("step " + loss[2].toLocaleString("en") + ", loss", loss[1].toPrecision(4)));
    const marks = data.marks.filter((m) => Math.abs(m[0] - t) <= near);
    for (const m of marks.slice(0, 4)) rows.push(line("+" + clock(m[0]) + " " + m[1], m[2]));
    if (marks.length > 4) rows.push(line("and", marks.length - 4 + " more events"));
    tip.replaceChildren(...rows);
    cross.hidden = tip.hidden = false;
    const x = event.clientX - whole.left;
    cross.style.left = x + "px";
    tip.style.left = Math.max(0, Math.min(x + 14, whole.width - tip.offsetWidth)) + "px";
    if (x + 14 + tip.offsetWidth > whole.width) tip.style.left = Math.max(0, x - 14 - tip.offsetWidth) + "px";
    tip.style.top = Math.max(0, Math.min(event.clientY - whole.top + 14, whole.height - tip.offsetHeight)) + "px";
  };
  const hide = () => { cross.hidden = tip.hidden = true; };
  box.addEventListener("pointermove", show);
  box.addEventListener("pointerdown", show);
  box.addEventListener("pointerleave", hide);
};
{
  const data = JSON.parse(document.getElementById("data").textContent);
  if (data && data.curves) {
    window.raytfPage(data);
    addEventListener("hashchange", () => location.reload());
  }
}
