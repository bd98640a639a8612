/* The little of HTTP/1.1 that a load tool and an instant upstream need: one incremental message reader for requests and
 * responses alike (Content-Length, chunked, or until the close), and a growing buffer.
 *
 * Knows nothing of sockets. A reader is fed bytes in pieces of any size and calls back with body bytes as they arrive;
 * it never copies a body.
 */
#ifndef BENCH_HTTP1_H
#define BENCH_HTTP1_H

#include <ctype.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>

#define HEAD_BYTES_MAX 16384

__attribute__((noreturn, format(printf, 1, 2))) static void die(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vfprintf(stderr, format, arguments);
  va_end(arguments);
  fputc('\n', stderr);
  exit(2);
}

static inline uint64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* ---- a growing buffer ---- */

typedef struct {
  char *data;
  size_t size, room;
} Buffer;

static inline void buffer_add(Buffer *b, const char *data, size_t size) {
  if (b->size + size > b->room) {
    b->room = (b->size + size) * 2;
    b->data = realloc(b->data, b->room);
    if (!b->data) die("out of memory");
  }
  memcpy(b->data + b->size, data, size);
  b->size += size;
}

__attribute__((format(printf, 2, 3))) static inline void buffer_printf(Buffer *b, const char *format, ...) {
  char small[4096];
  va_list arguments;
  va_start(arguments, format);
  int size = vsnprintf(small, sizeof small, format, arguments);
  va_end(arguments);
  if (size < 0 || (size_t)size >= sizeof small) die("a header of over %zu bytes", sizeof small);
  buffer_add(b, small, (size_t)size);
}

/* ---- a message reader ---- */

typedef enum { HEAD, BODY_SIZED, BODY_TO_CLOSE, CHUNK_SIZE, CHUNK_DATA, CHUNK_END, TRAILER, DONE, BROKEN } Phase;

typedef struct {
  Phase phase;
  char head[HEAD_BYTES_MAX + 1]; /* the start line and headers, a NUL after them */
  size_t head_size;
  uint64_t left;     /* bytes of the sized body, or of this chunk, still to come */
  size_t line_size;  /* of the chunk-size line or trailer being read */
  uint64_t body_bytes;
  int is_response, is_keep_alive;
} Reader;

typedef void (*BodySink)(void *owner, const char *data, size_t size);

static inline void reader_reset(Reader *r, int is_response) {
  r->phase = HEAD;
  r->head_size = r->line_size = 0;
  r->left = r->body_bytes = 0;
  r->is_response = is_response;
  r->is_keep_alive = 1;
}

/* The value of header `name` (with its colon, e.g. "content-length:"), or NULL; it ends at '\r'. */
static inline const char *reader_header(const Reader *r, const char *name) {
  size_t size = strlen(name);
  for (const char *line = strstr(r->head, "\r\n"); line && line[2]; line = strstr(line + 2, "\r\n")) {
    if (strncasecmp(line + 2, name, size) != 0) continue;
    const char *value = line + 2 + size;
    while (*value == ' ' || *value == '\t') value++;
    return value;
  }
  return NULL;
}

static inline int reader_header_has(const Reader *r, const char *name, const char *token) {
  const char *value = reader_header(r, name);
  if (!value) return 0;
  size_t size = strlen(token), length = strcspn(value, "\r");
  for (size_t i = 0; i + size <= length; i++)
    if (strncasecmp(value + i, token, size) == 0) return 1;
  return 0;
}

static inline int reader_status(const Reader *r) { return atoi(r->head + 9); }

static inline void reader_end_head(Reader *r) {
  r->head[r->head_size] = 0;
  r->is_keep_alive = !reader_header_has(r, "connection:", "close") && strncmp(r->head, "HTTP/1.0", 8) != 0;
  const char *length = reader_header(r, "content-length:");
  if (reader_header_has(r, "transfer-encoding:", "chunked")) {
    r->phase = CHUNK_SIZE;
  } else if (length) {
    r->left = strtoull(length, NULL, 10);
    r->phase = r->left ? BODY_SIZED : DONE;
  } else if (!r->is_response || reader_status(r) == 204 || reader_status(r) == 304) {
    r->phase = DONE;
  } else {
    r->phase = BODY_TO_CLOSE;
    r->is_keep_alive = 0;
  }
}

static inline size_t reader_take_head(Reader *r, const char *data, size_t size) {
  for (size_t i = 0; i < size; i++) {
    if (r->head_size >= HEAD_BYTES_MAX) {
      r->phase = BROKEN;
      return i;
    }
    r->head[r->head_size++] = data[i];
    if (data[i] == '\n' && r->head_size >= 4 && memcmp(r->head + r->head_size - 4, "\r\n\r\n", 4) == 0) {
      reader_end_head(r);
      return i + 1;
    }
  }
  return size;
}

static inline void reader_take_chunk_line(Reader *r, char c) {
  int digit = isdigit((unsigned char)c) ? c - '0' : isxdigit((unsigned char)c) ? tolower((unsigned char)c) - 'a' + 10 : -1;
  if (c == '\n') {
    r->phase = r->line_size == 0 ? BROKEN : r->left ? CHUNK_DATA : TRAILER;
    r->line_size = 0;
  } else if (digit >= 0 && r->line_size < 16) {
    r->left = r->left * 16 + (uint64_t)digit;
    r->line_size++;
  } else if (c == ';') {
    r->line_size = 16; /* an extension: skipped up to the line's end */
  } else if (c != '\r' && r->line_size < 16) {
    r->phase = BROKEN;
  }
}

/* Takes bytes until the message is complete or they run out; returns how many it took. Body bytes go to `sink`. */
static inline size_t reader_feed(Reader *r, const char *data, size_t size, BodySink sink, void *owner) {
  size_t at = 0;
  while (at < size && r->phase != DONE && r->phase != BROKEN) {
    size_t rest = size - at;
    switch (r->phase) {
      case HEAD: at += reader_take_head(r, data + at, rest); break;
      case BODY_SIZED:
      case CHUNK_DATA:
      case BODY_TO_CLOSE: {
        size_t taken = r->phase == BODY_TO_CLOSE || rest < r->left ? rest : (size_t)r->left;
        sink(owner, data + at, taken);
        r->body_bytes += taken;
        at += taken;
        if (r->phase == BODY_TO_CLOSE) break;
        r->left -= taken;
        if (!r->left) r->phase = r->phase == BODY_SIZED ? DONE : CHUNK_END;
        break;
      }
      case CHUNK_SIZE: reader_take_chunk_line(r, data[at++]); break;
      case CHUNK_END:
        if (data[at++] == '\n') r->phase = CHUNK_SIZE;
        break;
      case TRAILER: /* ends at an empty line */
        if (data[at] == '\n' && r->line_size == 0) r->phase = DONE;
        else if (data[at] == '\n') r->line_size = 0;
        else if (data[at] != '\r') r->line_size++;
        at++;
        break;
      default: break;
    }
  }
  return at;
}

#endif
