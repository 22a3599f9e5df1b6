// Before anything is drawn: the theme that this browser chose, so that no page flashes in the other one.
{
  const chosen = localStorage.getItem("theme");
  if (chosen) document.documentElement.dataset.theme = chosen;
}
