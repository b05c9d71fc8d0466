// A plain script, run before the page is drawn: the chosen theme must not flash in late.
(() => {
  const chosen = localStorage.getItem("omnistage.theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
