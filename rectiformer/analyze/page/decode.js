// Arrays of a record: base64 of gzip of little-endian values.

const TYPES = { u1: Uint8Array, u4: Uint32Array, f4: Float32Array };

// The values of an ARRAY {dtype, shape: [n], data}.
export async function decode({ dtype, shape, data }) {
  const TypedArray = TYPES[dtype];
  if (!TypedArray) throw new Error(`array of unknown dtype ${dtype}`);
  const packed = unbase64(data);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const buffer = await new Response(stream).arrayBuffer();
  if (buffer.byteLength !== shape[0] * TypedArray.BYTES_PER_ELEMENT) {
    throw new Error(`array of ${shape[0]} ${dtype} has ${buffer.byteLength} bytes`);
  }
  return new TypedArray(buffer);
}

function unbase64(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < bytes.length; i += 1) bytes[i] = binary.charCodeAt(i);
  return bytes;
}
