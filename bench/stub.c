/* An instant upstream: the least an OpenAI-compatible server can be, so that a bench measures the gateway before it.
 *
 *   stub [--port N] [--content-bytes N] [--chunks N]
 *
 * Prints its port, then serves on 127.0.0.1 until SIGTERM or the end of its parent:
 *   POST /v1/chat/completions           a chat.completion of --content-bytes, or with `"stream": true` a stream of --chunks
 *                                       deltas sent at once, a finish chunk, usage when asked for, [DONE]
 *   POST /pace/MS/v1/chat/completions   the same, a chunk every MS milliseconds on an absolute schedule
 *   GET  /stats                         requests, streams, connections opened, its own CPU seconds
 * Every answer is rendered once, at the start; a request costs a read, a scan for two fields and a write. A body is
 * judged by substrings, not parsed: good for a bench's own requests, not for anybody else's.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "http1.h"

#define CONNECTIONS_MAX 4096
#define READ_BYTES 65536

typedef struct {
  int fd, is_paced, wants_usage, next_chunk, is_waiting_to_write;
  uint64_t due_ns, pace_ns;
  Reader reader;
  Buffer body, out;
  size_t sent;
} Connection;

static struct {
  int epoll, timer, listener, chunks;
  Buffer whole, stream, stream_usage; /* complete responses, as sent at once */
  Buffer stream_head, *frames, usage_frame, last_frame;
  uint64_t requests, streams, connections;
  Connection *by_fd[CONNECTIONS_MAX];
  int paced;    /* connections with a paced answer on its way */
  int fd_max;   /* the highest that was ever used */
} stub;

static const char IDENTITY[] =
    "\"id\":\"chatcmpl-stub00000001\",\"created\":1700000000,\"model\":\"stub\",\"system_fingerprint\":\"fp_stub\"";

static void add_frame(Buffer *out, const char *data, size_t size) {
  char line[32];
  buffer_add(out, line, (size_t)sprintf(line, "%zx\r\n", size + 8));
  buffer_add(out, "data: ", 6);
  buffer_add(out, data, size);
  buffer_add(out, "\n\n\r\n", 4);
}

static void render(int content_bytes) {
  static const char words[] = "an answer made of words that mean nothing and cost nothing to make ";
  Buffer body = {0};
  buffer_printf(&body, "{%s,\"object\":\"chat.completion\",\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"",
                IDENTITY);
  for (int i = 0; i < content_bytes; i++) buffer_add(&body, words + (size_t)i % (sizeof words - 1), 1);
  buffer_printf(&body, "\"},\"logprobs\":null,\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":24,\"completion_tokens\":%d,"
                "\"total_tokens\":%d}}", content_bytes / 4, 24 + content_bytes / 4);
  buffer_printf(&stub.whole, "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nx-request-id: req_stub\r\ncontent-length: %zu\r\n\r\n",
                body.size);
  buffer_add(&stub.whole, body.data, body.size);

  buffer_printf(&stub.stream_head, "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
                "x-request-id: req_stub\r\ntransfer-encoding: chunked\r\n\r\n");
  stub.frames = calloc((size_t)stub.chunks + 1, sizeof *stub.frames);
  for (int i = 0; i <= stub.chunks; i++) {
    body.size = 0;
    buffer_printf(&body, "{%s,\"object\":\"chat.completion.chunk\",\"choices\":[{\"index\":0,\"delta\":{", IDENTITY);
    if (i == 0) buffer_printf(&body, "\"role\":\"assistant\",");
    if (i < stub.chunks) buffer_printf(&body, "\"content\":\" word%02d\"", i % 100);
    buffer_printf(&body, "},\"logprobs\":null,\"finish_reason\":%s}]}", i < stub.chunks ? "null" : "\"stop\"");
    add_frame(&stub.frames[i], body.data, body.size);
  }
  body.size = 0;
  buffer_printf(&body, "{%s,\"object\":\"chat.completion.chunk\",\"choices\":[],\"usage\":{\"prompt_tokens\":24,\"completion_tokens\":%d,"
                "\"total_tokens\":%d}}", IDENTITY, stub.chunks, 24 + stub.chunks);
  add_frame(&stub.usage_frame, body.data, body.size);
  add_frame(&stub.last_frame, "[DONE]", 6);
  buffer_add(&stub.last_frame, "0\r\n\r\n", 5);

  for (int with_usage = 0; with_usage < 2; with_usage++) {
    Buffer *all = with_usage ? &stub.stream_usage : &stub.stream;
    buffer_add(all, stub.stream_head.data, stub.stream_head.size);
    for (int i = 0; i <= stub.chunks; i++) buffer_add(all, stub.frames[i].data, stub.frames[i].size);
    if (with_usage) buffer_add(all, stub.usage_frame.data, stub.usage_frame.size);
    buffer_add(all, stub.last_frame.data, stub.last_frame.size);
  }
}

static void drop(Connection *c) {
  stub.paced -= c->is_paced;
  stub.by_fd[c->fd] = NULL;
  close(c->fd);
  free(c->body.data);
  free(c->out.data);
  free(c);
}

/* Writes what is waiting; 0 when the connection is gone. */
static int flush(Connection *c) {
  while (c->sent < c->out.size) {
    ssize_t n = send(c->fd, c->out.data + c->sent, c->out.size - c->sent, MSG_NOSIGNAL);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) break;
    if (n < 0) {
      drop(c);
      return 0;
    }
    c->sent += (size_t)n;
  }
  int is_full = c->sent < c->out.size;
  if (!is_full) c->out.size = c->sent = 0;
  if (is_full != c->is_waiting_to_write) {
    struct epoll_event event = {.events = is_full ? EPOLLIN | EPOLLOUT : EPOLLIN, .data.fd = c->fd};
    epoll_ctl(stub.epoll, EPOLL_CTL_MOD, c->fd, &event);
    c->is_waiting_to_write = is_full;
  }
  return 1;
}

/* Whether `"name": true` occurs in the body. */
static int is_set(const Connection *c, const char *quoted_name) {
  size_t size = strlen(quoted_name);
  const char *at = c->body.data, *end = c->body.data + c->body.size;
  while (at && at < end && (at = memmem(at, (size_t)(end - at), quoted_name, size))) {
    at += size;
    while (at < end && (*at == ' ' || *at == ':')) at++;
    if (end - at >= 4 && memcmp(at, "true", 4) == 0) return 1;
  }
  return 0;
}

static void answer_stats(Connection *c) {
  struct rusage used;
  getrusage(RUSAGE_SELF, &used);
  char text[256];
  int size = sprintf(text, "{\"requests\":%lu,\"streams\":%lu,\"connections\":%lu,\"cpu_s\":%.6f}", (unsigned long)stub.requests,
                     (unsigned long)stub.streams, (unsigned long)stub.connections,
                     (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) + (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6);
  buffer_printf(&c->out, "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s", size, text);
}

static void set_timer(uint64_t due_ns) {
  struct itimerspec when = {.it_value = {(time_t)(due_ns / 1000000000u), (long)(due_ns % 1000000000u)}};
  timerfd_settime(stub.timer, TFD_TIMER_ABSTIME, &when, NULL);
}

/* Sends the paced chunks that are due and arms the timer for the next. Linear in open connections: hundreds, not thousands. */
static void pace(void) {
  uint64_t now = now_ns(), next = UINT64_MAX;
  for (int fd = 0; fd <= stub.fd_max && stub.paced; fd++) {
    Connection *c = stub.by_fd[fd];
    if (!c || !c->is_paced) continue;
    while (c->is_paced && c->due_ns <= now) {
      const Buffer *frame = &stub.frames[c->next_chunk];
      buffer_add(&c->out, frame->data, frame->size);
      c->due_ns += c->pace_ns;
      if (c->next_chunk++ == stub.chunks) {
        if (c->wants_usage) buffer_add(&c->out, stub.usage_frame.data, stub.usage_frame.size);
        buffer_add(&c->out, stub.last_frame.data, stub.last_frame.size);
        c->is_paced = 0;
        stub.paced--;
      }
    }
    if (c->is_paced && c->due_ns < next) next = c->due_ns;
    if (c->out.size) flush(c);
  }
  if (next != UINT64_MAX) set_timer(next);
}

static void answer(Connection *c) {
  const char *path = strchr(c->reader.head, ' ');
  path = path ? path + 1 : "";
  if (strncmp(path, "/stats", 6) == 0) {
    answer_stats(c);
    return;
  }
  unsigned long pace_ms = strncmp(path, "/pace/", 6) == 0 ? strtoul(path + 6, NULL, 10) : 0;
  if (strncmp(c->reader.head, "POST", 4) != 0 || !strstr(path, "/chat/completions")) {
    buffer_printf(&c->out, "HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n");
    return;
  }
  stub.requests++;
  if (!is_set(c, "\"stream\"")) {
    buffer_add(&c->out, stub.whole.data, stub.whole.size);
    return;
  }
  stub.streams++;
  c->wants_usage = is_set(c, "\"include_usage\"");
  if (!pace_ms) {
    const Buffer *all = c->wants_usage ? &stub.stream_usage : &stub.stream;
    buffer_add(&c->out, all->data, all->size);
    return;
  }
  buffer_add(&c->out, stub.stream_head.data, stub.stream_head.size);
  c->is_paced = 1;
  c->next_chunk = 0;
  c->pace_ns = pace_ms * 1000000u;
  c->due_ns = now_ns();
  stub.paced++;
}

static void keep_body(void *owner, const char *data, size_t size) { buffer_add(&((Connection *)owner)->body, data, size); }

static void serve(Connection *c) {
  static char in[READ_BYTES];
  ssize_t n = recv(c->fd, in, sizeof in, 0);
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (n <= 0) {
    drop(c);
    return;
  }
  for (size_t at = 0; at < (size_t)n;) {
    at += reader_feed(&c->reader, in + at, (size_t)n - at, keep_body, c);
    if (c->reader.phase == BROKEN) {
      drop(c);
      return;
    }
    if (c->reader.phase != DONE) break;
    answer(c);
    c->body.size = 0;
    reader_reset(&c->reader, 0);
  }
  if (stub.paced && c->is_paced) pace();
  else if (c->out.size) flush(c);
}

static void accept_all(void) {
  int fd;
  while ((fd = accept4(stub.listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0) {
    if (fd >= CONNECTIONS_MAX) {
      close(fd);
      continue;
    }
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int));
    Connection *c = calloc(1, sizeof *c);
    if (!c) die("out of memory");
    c->fd = fd;
    reader_reset(&c->reader, 0);
    stub.by_fd[fd] = c;
    if (fd > stub.fd_max) stub.fd_max = fd;
    stub.connections++;
    struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
    epoll_ctl(stub.epoll, EPOLL_CTL_ADD, fd, &event);
  }
}

static int listen_on(int port) {
  int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &(int){1}, sizeof(int));
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t size = sizeof address;
  if (fd < 0 || bind(fd, (struct sockaddr *)&address, size) || listen(fd, 1024)) die("stub: port %d: %s", port, strerror(errno));
  getsockname(fd, (struct sockaddr *)&address, &size);
  printf("%d\n", ntohs(address.sin_port));
  fflush(stdout);
  return fd;
}

int main(int argc, char **argv) {
  int port = 0, content_bytes = 400;
  stub.chunks = 64;
  for (int i = 1; i + 1 < argc; i += 2) {
    int value = atoi(argv[i + 1]);
    if (strcmp(argv[i], "--port") == 0) port = value;
    else if (strcmp(argv[i], "--content-bytes") == 0) content_bytes = value;
    else if (strcmp(argv[i], "--chunks") == 0) stub.chunks = value;
    else die("stub: unknown option %s", argv[i]);
  }
  if (argc % 2 == 0 || stub.chunks < 1) die("usage: stub [--port N] [--content-bytes N] [--chunks N]");
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  struct rlimit files = {CONNECTIONS_MAX, CONNECTIONS_MAX};
  setrlimit(RLIMIT_NOFILE, &files);
  render(content_bytes);
  stub.epoll = epoll_create1(EPOLL_CLOEXEC);
  stub.timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
  stub.listener = listen_on(port);
  struct epoll_event event = {.events = EPOLLIN, .data.fd = stub.listener};
  epoll_ctl(stub.epoll, EPOLL_CTL_ADD, stub.listener, &event);
  event.data.fd = stub.timer;
  epoll_ctl(stub.epoll, EPOLL_CTL_ADD, stub.timer, &event);
  for (;;) {
    struct epoll_event ready[256];
    int count = epoll_wait(stub.epoll, ready, 256, -1);
    for (int i = 0; i < count; i++) {
      int fd = ready[i].data.fd;
      if (fd == stub.listener) {
        accept_all();
      } else if (fd == stub.timer) {
        uint64_t expirations;
        if (read(fd, &expirations, sizeof expirations) > 0) pace();
      } else if (stub.by_fd[fd]) {
        Connection *c = stub.by_fd[fd];
        if (!(ready[i].events & EPOLLOUT) || flush(c)) serve(c);
      }
    }
  }
}
