const root = document.documentElement;
document.getElementById("mode").onclick = () => {
  const dark = root.dataset.mode ? root.dataset.mode === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.mode = dark ? "light" : "dark";
};
function save(name, type, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
document.getElementById("download").onclick = () => {
  const cells = JSON.parse(document.getElementById("cells").textContent);
  save("cells.jsonl", "application/x-ndjson", cells.map((cell) => JSON.stringify(cell) + "\n").join(""));
};
for (const button of document.querySelectorAll("button.save")) {
  button.onclick = () => {
    const copy = button.closest("figure").querySelector("svg").cloneNode(true);
    const style = getComputedStyle(root);
    const [, , width, height] = copy.getAttribute("viewBox").split(" ");
    copy.setAttribute("width", width);
    copy.setAttribute("height", height);
    const text = new XMLSerializer().serializeToString(copy);
    save(button.dataset.name + ".svg", "image/svg+xml", text.replace(/var\((--\w+)\)/g, (_, name) => style.getPropertyValue(name)));
  };
}
