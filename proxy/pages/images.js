// Images that go with the next question: dropped on the page, pasted into the message, or chosen. They are read here and
// sent as data URLs; nothing is fetched.

import { button } from "./answer.js";
import { byId, bytes, el } from "./parts.js";

const KINDS = ["image/png", "image/jpeg", "image/gif", "image/webp"];

let waiting = []; // {name, size, url}

// Parts of a chat message: the images, then the text.
export function content(text, images) {
  if (!images.length) return text;
  const parts = images.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  return text.trim() ? [...parts, { type: "text", text }] : parts;
}

export const waitingImages = () => waiting;

export function clearImages() {
  waiting = [];
  draw();
}

// [] or one element that shows them.
export function pictures(images, act = () => []) {
  if (!images.length) return [];
  return [el("ul", "pictures", ...images.map((image) => {
    const shown = el("img");
    shown.src = image.url;
    shown.alt = image.name;
    return el("li", "", shown, el("span", "soft", image.name + ", " + bytes(image.size)), ...act(image));
  }))];
}

function draw() {
  const remove = (image) => [button("Remove", "quiet", () => {
    waiting = waiting.filter((each) => each !== image);
    draw();
    byId("message").focus();
  })];
  byId("images").replaceChildren(...pictures(waiting, remove));
}

function read(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve({ name: file.name || "image", size: file.size, url: reader.result }));
    reader.addEventListener("error", () => reject(reader.error));
    reader.readAsDataURL(file);
  });
}

// `tell`: says something to the person.
export function receiveImages(tell) {
  const take = async (files) => {
    const taken = files.filter((file) => KINDS.includes(file.type));
    const refused = files.filter((file) => !KINDS.includes(file.type)).map((file) => file.name);
    const results = await Promise.allSettled(taken.map(read));
    waiting = [...waiting, ...results.filter((each) => each.status === "fulfilled").map((each) => each.value)];
    refused.push(...taken.filter((_, index) => results[index].status === "rejected").map((file) => file.name));
    draw();
    const words = refused.length ? "Not taken: " + refused.join(", ") + ". Images are PNG, JPEG, GIF or WebP." : "";
    byId("images-refused").textContent = words;
    tell(words || "Images: " + waiting.length + ".");
  };
  const over = (is) => document.body.classList.toggle("dropping", is);
  const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
  document.addEventListener("dragover", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault(); // else the browser would open the file in place of the page
    over(true);
  });
  document.addEventListener("dragleave", (event) => {
    if (!event.relatedTarget) over(false);
  });
  document.addEventListener("drop", (event) => {
    over(false);
    if (!hasFiles(event)) return;
    event.preventDefault();
    take([...event.dataTransfer.files]);
  });
  byId("message").addEventListener("paste", (event) => {
    const files = [...event.clipboardData.files];
    if (!files.length) return;
    event.preventDefault();
    take(files);
  });
  byId("image-button").addEventListener("click", () => byId("image-files").click());
  byId("image-files").addEventListener("change", () => {
    take([...byId("image-files").files]);
    byId("image-files").value = "";
  });
}
