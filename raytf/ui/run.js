"use strict";
// The page of a run is drawn again when something of the run has changed; the choices in its address and the place on
// the page stay. A sign of life, which comes every second, changes the head of the page alone.
(() => {
  const name = location.pathname.replace(/^\/run\//, "");
  let mark = JSON.parse(document.getElementById("data").textContent).mark, busy = false, told = mark;
  const kept = (text) => text.split("\n")[0];
  const isInUse = () => String(document.getSelection()) !== "" || document.querySelector(".u-select:not([style*='width: 0'])[style*='width']") !== null;
  const drawHead = async () => {
    const answer = await fetch("/api/head/" + name);
    if (!answer.ok) return;
    const page = await answer.json();
    document.getElementById("head").outerHTML = page.head;
    document.title = page.title;
    mark = kept(mark) + "\n" + page.mark.split("\n")[1];
  };
  const drawAll = async () => {
    const answer = await fetch("/api/page/" + name);
    if (!answer.ok) return;
    const page = await answer.json();
    if (page.data.mark === mark) return;
    mark = page.data.mark;
    const at = scrollY, main = document.querySelector("main"), nav = main.querySelector("nav");
    const focus = document.activeElement && document.activeElement.id;
    main.innerHTML = page.main;
    main.prepend(nav);
    document.title = page.title;
    window.raytfPage(page.data);
    scrollTo(0, at);
    if (focus && document.getElementById(focus)) document.getElementById(focus).focus();
  };
  const refresh = async () => {
    if (busy) return;
    busy = true;
    while (told !== mark) {
      const began = performance.now(), before = mark;
      try {
        await (kept(told) === kept(mark) || isInUse() ? drawHead() : drawAll());
      } catch { /* the server has ended, or will answer again */ }
      // What takes long is not done all the time.
      await new Promise((done) => setTimeout(done, mark === before ? 500 : 3 * (performance.now() - began)));
    }
    busy = false;
  };
  new EventSource("/events/" + name).onmessage = (event) => { told = JSON.parse(event.data); refresh(); };
})();
