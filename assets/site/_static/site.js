// ?answers opens every fold: for a printed sheet with answers
if (new URLSearchParams(location.search).has("answers")) {
  addEventListener("DOMContentLoaded", () => document.querySelectorAll("details").forEach((fold) => { fold.open = true; }));
}
