"use strict";
// The page of a run is drawn again when something of the run has changed; controls and place on the page stay.
(() => {
  const name = location.pathname.replace(/^\/run\//, "");
  let mark = JSON.parse(document.getElementById("data").textContent).mark, busy = false, again = false;
  const refresh = async () => {
    if (busy) { again = true; return; }
    busy = true;
    try {
      const answer = await fetch("/api/page/" + name);
      if (answer.ok) {
        const page = await answer.json();
        if (page.data.mark !== mark) {
          mark = page.data.mark;
          const kept = ["by", "smooth", "log"].map((id) => {
            const control = document.getElementById(id);
            return control && [id, control.value, control.checked];
          });
          const at = scrollY, main = document.querySelector("main"), nav = main.querySelector("nav");
          const focus = document.activeElement && document.activeElement.id;
          main.innerHTML = page.main;
          main.prepend(nav);
          document.title = page.title;
          for (const one of kept) {
            const control = one && document.getElementById(one[0]);
            if (control) { control.value = one[1]; control.checked = one[2]; }
          }
          window.raytfPage(page.data);
          scrollTo(0, at);
          if (focus && document.getElementById(focus)) document.getElementById(focus).focus();
        }
      }
    } finally {
      busy = false;
      if (again) { again = false; refresh(); }
    }
  };
  new EventSource("/events/" + name).onmessage = (event) => { if (JSON.parse(event.data) !== mark) refresh(); };
})();
