"""The code that a method makes the target run: it opens the private channel and runs what comes over it.

Theory of operation
    The source has three stages, one inside the other as text:

    1. What PyRun_SimpleString runs in the program's `__main__`, or 3.14's remote debugging in a namespace of its own.
       It is one expression, so that no name is made there, not even for a moment: another thread may be in the
       middle of a walk through its globals.
    2. Still on that thread: a dozen bytecodes that start a thread by `_thread` (invisible to `threading`) with the
       third stage. This is all that the training thread executes, about 0.1 ms. A signal handler of the program may
       run in these bytecodes and raise; its exception is not ours to swallow. It goes to the new thread, which raises
       it anew in the thread that it came from.
    3. The thread. It claims the token, makes the socket pair and the memfd whose name tells which end is the daemon's,
       waits at most CHANNEL_WAIT_S for one packet, closes the daemon's end and the memfd, and executes the packet:
       the loader of `kineto_agent.boot.loader`, which is given the channel and the descriptors that came along.

    `sys._kineto_attach` is all that stays: the last token, so that a bootstrap which comes late or twice does
    nothing, and what the loader keeps for the next attach. "open" there is what a child forked meanwhile must close;
    one fork hook for the life of the process does so.

    Where gevent has put a function of its own in the place of start_new_thread, the interpreter's is taken from there.
    Nothing that exists only in `threading`, `socket` or `signal` is used: those modules might not be imported yet.
"""

from kinetod.attach.interface import MAX_BOOTSTRAP_BYTES, Bootstrap

CHANNEL_WAIT_S = 10  # for the daemon to find the channel and send the agent; then it is closed

# 5 is SOCK_SEQPACKET, 0x40000000 MSG_CMSG_CLOEXEC, 319 and 279 memfd_create (missing in a Python that was built for
# an old C library); the signals that stay open are the synchronous ones.
_THREAD = """\
def boot(k,e,t):
 import sys,posix,_signal,_socket
 _signal.pthread_sigmask(0,set(_signal.valid_signals())-{4,5,6,7,8,11,31})
 if e is not None and (e.__traceback__.tb_next or not isinstance(e,RuntimeError)):
  import ctypes,time
  time.sleep(.01)
  class again(type(e)):
   def __new__(c,*a):return e
  ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(t),ctypes.py_object(again))
 s=sys.__dict__.setdefault('_kineto_attach',{'tokens':{},'open':[]})
 n=s['tokens'];m=object()
 if n.setdefault(k,m) is not m or max(list(n))>k:return
 for x in list(n):
  if x<k:n.pop(x,None)
 o=s['open']
 def close(*a):
  for x in a or o[:]:
   if x in o:o.remove(x)
   try:x.close() if hasattr(x,'close') else posix.close(x)
   except OSError:pass
 if 'fork' not in s:
  s['fork']=1
  posix.register_at_fork(after_in_child=close)
 d=[]
 a,b=_socket.socketpair(1,5)
 o+=[a,b]
 try:
  w='kineto-%d-%d'%(k,b.fileno())
  if hasattr(posix,'memfd_create'):f=posix.memfd_create(w,1)
  else:
   import ctypes
   f=ctypes.CDLL(None).syscall({'x86_64':319,'aarch64':279}[posix.uname()[4]],w.encode(),1)
  o.append(f)
  a.settimeout(WAIT)
  try:p,c,_,_=a.recvmsg(65536,_socket.CMSG_SPACE(32),0x40000000)
  finally:close(b,f)
  d=[x for c in c for x in memoryview(c[2]).cast('i')]
  o+=d
  g={'__name__':'kineto_loader'}
  exec(compile(p,'<kineto-loader>','exec'),g)
  g['load'](s,a,d)
 except BaseException as x:
  try:a.send(b'E'+repr(x).encode()[:500])
  except OSError:pass
  close(a,*d)
try:boot(TOKEN,e,t)
except BaseException:pass
"""

_STARTER = """\
e,t=None,0
for i in 1,2,3:
 try:
  import sys,_thread as h
  s=getattr(sys.modules.get('gevent.monkey'),'saved',{}).get('_thread',{}).get('start_new_thread',h.start_new_thread)
  s(exec,(c,{'e':e,'t':t}))
  break
 except BaseException as x:
  import _thread as h
  e,t=x,h.get_ident()
"""

_MAIN = "try:exec(%r,{'c':%r})\nexcept BaseException:pass\n"


def make(token: int) -> Bootstrap:
    """The bootstrap of one attach. token: greater than that of any attach before (Unix ns)."""
    thread = _THREAD.replace("TOKEN", str(token)).replace("WAIT", str(CHANNEL_WAIT_S))
    source = (_MAIN % (_STARTER, thread)).encode("ascii")
    assert len(source) <= MAX_BOOTSTRAP_BYTES, len(source)
    return Bootstrap(token, source)
