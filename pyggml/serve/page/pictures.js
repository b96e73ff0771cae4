// Pictures: those that go with the next message, those of a message, and where attention looked on one.

import { $, h, iconButton, say } from "./dom.js";
import { percent } from "./tokens.js";

const LONGEST = 1024; // pixels of the longer side of a picture that is sent, and kept in this browser
const MOST = 8; // pictures of a message

/** A picture's file as a data URL, not larger than models look at. Throws when it is no picture. */
async function read(file) {
  const bitmap = await createImageBitmap(file);
  const by = Math.min(1, LONGEST / Math.max(bitmap.width, bitmap.height));
  const canvas = h("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * by));
  canvas.height = Math.max(1, Math.round(bitmap.height * by));
  const to = canvas.getContext("2d");
  to.fillStyle = "#fff"; // what is transparent
  to.fillRect(0, 0, canvas.width, canvas.height);
  to.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
  const small = canvas.toDataURL("image/jpeg", 0.85);
  const exact = canvas.toDataURL("image/png");
  return exact.length < small.length ? exact : small;
}

/** Lets pictures be chosen, pasted and dropped into the message field. `changed` is called whenever there are others. */
export function startPictures(changed) {
  let urls = [];
  let on = false;
  const file = $("picture-file");
  const show = () => {
    const made = urls.map((url, i) => {
      const drop = iconButton("close", `Remove picture ${i + 1}`, () => {
        urls = urls.filter((_, k) => k !== i);
        show();
        $("say").focus();
      });
      return h("li", {}, h("img", { src: url, alt: `Picture ${i + 1}` }), drop);
    });
    $("pictures").replaceChildren(...made);
    $("pictures").hidden = !urls.length;
    changed();
  };
  const take = async (files) => {
    for (const one of [...files].filter(({ type }) => type.startsWith("image/")).slice(0, MOST - urls.length)) {
      try {
        urls = [...urls, await read(one)];
      } catch {
        say(`${one.name} cannot be read as a picture`);
      }
    }
    file.value = "";
    show();
  };
  $("attach").addEventListener("click", () => file.click());
  file.addEventListener("change", () => take(file.files));
  $("say").addEventListener("paste", (e) => {
    if (!on || !e.clipboardData.files.length) return;
    e.preventDefault();
    take(e.clipboardData.files);
  });
  $("composer").addEventListener("dragover", (e) => on && e.preventDefault());
  $("composer").addEventListener("drop", (e) => {
    if (!on || !e.dataTransfer.files.length) return;
    e.preventDefault();
    take(e.dataTransfer.files);
  });
  return {
    /** Whether pictures can be sent now. */
    allow(yes) {
      on = yes;
      $("attach").hidden = !yes;
      $("pictures").hidden = !yes || !urls.length;
    },
    /** How many there are. */
    get size() {
      return on ? urls.length : 0;
    },
    /** The pictures, which are gone then. */
    taken() {
      const found = on ? urls : [];
      if (found.length) {
        urls = [];
        show();
      }
      return found;
    },
  };
}

/** The pictures of a message. */
export const picturesOf = (node) =>
  h("div.pictures", {}, ...node.pictures.map((url, i) => h("img", { src: url, alt: `Picture ${i + 1} of the message` })));

/** A picture with a grid of `lines` and `columns` over it. `look(weights)`: leave light what got attention. */
export function lookedAt(url, lines, columns) {
  const veil = h("canvas", { "aria-hidden": "true" });
  veil.width = columns;
  veil.height = lines;
  const to = veil.getContext("2d");
  const image = h("img", { src: url, alt: "" });
  const said = h("figcaption");
  const look = (weights) => {
    to.clearRect(0, 0, columns, lines);
    if (!weights) {
      said.textContent = "";
      return;
    }
    const most = Math.max(...weights, 1e-9);
    weights.forEach((w, i) => {
      to.fillStyle = `rgb(8 10 16 / ${0.82 * (1 - w / most)})`;
      to.fillRect(i % columns, Math.floor(i / columns), 1, 1);
    });
    const at = Math.max(weights.indexOf(most), 0);
    const share = weights.reduce((sum, w) => sum + w, 0);
    const where = `most at line ${Math.floor(at / columns) + 1} of ${lines}, column ${(at % columns) + 1} of ${columns}`;
    said.textContent = `${percent(Math.log(share))} on the picture, ${where}`;
    image.alt = `The picture, light where attention looks: ${said.textContent}`;
  };
  return { element: h("figure.looked", {}, h("div", {}, image, veil), said), look };
}
